"""The plans that come with remat: each is loaded, judged and refused where it does not belong."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from helpers import ROOT, refused, run_python

import remat
from experiments import zoo as maker
from experiments.store import Table, key_of
from remat import InvalidPlan, UnknownName, zoo
from remat.cli import main
from remat.frontends.monet import monet_graph

SMALL = "vgg16_b32_0.8"  # the PyTorch model with the fewest operations
STEP = "vit_b16_0.6"  # one that computes again


def test_graph_plans_keep_what_the_index_says() -> None:
    for name in zoo.names("graph"):
        entry, graph, plan = zoo.describe(name), zoo.graph(name), zoo.load(name)
        trace = remat.simulate(graph, plan)
        assert plan.graph_sha256 == graph.sha256()
        assert (trace.peak_bytes, trace.cost) == (entry["peak_bytes"], entry["cost"])
        assert trace.peak_bytes <= entry["budget_bytes"]
        assert entry["bound"] <= entry["cost"]
        network, ending = graph.name.removesuffix("_p100"), "_p100" if graph.name.endswith("_p100") else ""
        assert name == f"{network}_{entry['budget_bytes'] / 2**30:.3g}GB{ending}"
        assert {"strategy", "time_limit_s", "threads", "seed", "scope"} <= set(entry["made_from"])
        assert {"remat", "python"} <= set(entry["versions"])


def test_every_network_of_monet_is_there_and_its_graph_is_todays() -> None:
    """If this fails, the graphs have changed since: run ``python run.py experiment=zoo keep=true``."""
    for network in ("resnet50", "googlenet", "unet", "mobilenet_v2", "vgg16"):
        mine = [name for name in zoo.names("graph") if name.startswith(f"{network}_b") and name.endswith("GB")]
        assert len(mine) >= 5
        assert {zoo.load(name).graph_sha256 for name in mine} == {monet_graph(network).sha256()}


def test_files_are_small_and_shipped() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = [path for path in zoo.FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    for path in files:
        relative = path.relative_to(zoo.FOLDER)
        assert any(fnmatch.fnmatch(f"plans/{relative}", pattern) for pattern in package_data["remat.zoo"])
    assert (ROOT / "zoo" / zoo.INDEX).samefile(zoo.FOLDER / zoo.INDEX)


def test_loading_is_fast_offline_and_needs_no_framework() -> None:
    code = """
import socket, sys, time
socket.socket = None
began = time.perf_counter()
import remat.zoo
plan = remat.zoo.load(remat.zoo.names("graph")[0])
assert time.perf_counter() - began < 1.0 + 2.0, "slow"  # a busy machine
print([m for m in ("torch", "tensorflow", "cvxpy", "ortools", "highspy", "scipy") if m in sys.modules])
"""
    assert run_python(code).strip() == "[]"


def test_names_that_are_no_plan_of_a_graph_say_which_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["zoo"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + sum(len(zoo.names(kind)) for kind in zoo.KINDS)
    name, only_torch, only_graph = zoo.names("graph")[0], "resnet50_b16_0.8", "resnet50_b184_10GB_p100"
    with refused(rf"'{name}x'; did you mean .*{name}", UnknownName):
        zoo.load(f"{name}x")
    for wrong in ("", "zoo:", "../index", "index.json", "graphs/vgg16_b176"):
        with refused(kind=UnknownName):
            zoo.load(wrong)
    assert zoo.load(f"zoo:{name}").graph_sha256 == zoo.load(name).graph_sha256
    with refused("is a plan of a PyTorch step"):
        zoo.load(only_torch)
    with refused("is a plan of MONeT's graph"):
        zoo.resolved(f"zoo:{only_graph}")
    assert zoo.resolved("plan.json") == "plan.json"
    index = {"graph": {"a_1GB": {"note": "INFEASIBLE: too small"}}, "torch": {}}
    monkeypatch.setattr(zoo, "_index", lambda: index)
    with refused("zoo:a_1GB: there is no such plan: INFEASIBLE: too small"):  # it was tried without success
        zoo.load("a_1GB")
    assert zoo.names() == ()
    with refused("no plan has 'nothing' in its name"):
        next(maker.zoo.cases(only="nothing"))


def model_and_arguments(name: str) -> tuple[Any, tuple[Any, ...]]:
    from remat.frontends.spec import ModelSpec, load_target
    from remat.torch.frontend import build

    spec = ModelSpec(**zoo.describe(name, "torch")["made_from"]["spec"])
    model, arguments, _ = build.build(spec, load_target(spec.target), "cpu")
    return model.train(), arguments


def test_a_step_follows_the_plan_of_the_zoo() -> None:
    import torch

    import remat.torch as rt

    model, (x,) = model_and_arguments(STEP)
    x = torch.randn(x.shape)
    entry = zoo.describe(STEP, "torch")
    module = rt.rematerialize(model, (x,), plan=f"zoo:{STEP}", verify=True)
    assert any(module.plan.recomputed)
    # When the zoo was made, the states of six random operations were counted; now they lie outside of the allocator.
    # A loss outside was not taken to hold a tensor of the outputs' size to the end of the step, as it is now.
    states, held = 6 * torch.get_rng_state().nbytes, model(x).nbytes
    assert module.predicted_peak_bytes == entry["peak_bytes"] - states + held <= entry["budget_bytes"]
    assert module.measured_peak_bytes <= entry["budget_bytes"]
    gradients = []
    for step in (model, module):
        torch.manual_seed(1)
        model.zero_grad()
        step(x).square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert gradients[0]
    assert all(map(torch.equal, *gradients))


def test_what_does_not_match_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch import nn

    import remat.torch as rt
    from remat.torch.planning import planner

    model, (x,) = model_and_arguments(SMALL)
    small = torch.zeros(2, *x.shape[1:])
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * (x.shape[2] - 2) * (x.shape[3] - 2), 10))

    def says(model: nn.Module, arguments: Any, text: str) -> None:
        with refused(rf"^zoo:{SMALL}: was made for .*{re.escape(text)}", InvalidPlan):
            rt.rematerialize(model, (arguments,), plan=f"zoo:{SMALL}")

    says(model, small, f"inputs float32{list(x.shape)}, not for float32{list(small.shape)}")
    says(other, x, "another model")
    monkeypatch.setattr(planner, "VERSION", "9.9.9")
    says(other, x, f"torch {torch.__version__.split('+')[0]}, this is 9.9.9; plan again")


def test_nothing_in_the_zoo_is_out_of_date_and_the_files_are_what_the_rows_say(here: Path) -> None:
    """If this fails, settings or graphs have changed since: run ``python run.py experiment=zoo keep=true``."""
    rows = Table("zoo").rows(kept_only=True)
    assert {key_of(case) for case in maker.zoo.cases()} <= {row["case_key"] for row in rows}
    kept = maker.page(rows).kept
    assert {*kept} == {path for path in zoo.FOLDER.rglob("*") if path.is_file()}
    assert [file for file, drawn in kept.items() if file.read_bytes() != drawn.read_bytes()] == []


def test_every_committed_row_of_a_step_has_a_measurement_or_says_why_not() -> None:
    for name in ("executed_steps", "implementations"):
        for row in Table(name).rows():
            assert row["cpu"] and row["versions"]  # noqa: PT018
            assert row["measured_peak_bytes"] or row["offered"] is not None or row["note"]


def test_a_plan_is_made_or_the_row_says_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    graph = remat.Graph.from_nodes("chain", [[], [0], [1], [0, 2]], [8, 8, 8, 8], [1, 1, 1, 1])
    monkeypatch.setattr(maker, "_graph_of", lambda _name: graph)
    settings = {"strategy": "checkmate_milp", "time_limit_s": 5.0, "threads": 1, "seed": 0, "scope": "staged"}
    made, none = (
        next(iter(maker.measure("graph", "chain", settings | {"graph_sha256": graph.sha256(), "budget_bytes": budget})))
        for budget in (24, 8)
    )
    (tmp_path / "plan.json").write_text(made["plan"])
    trace = remat.simulate(graph, remat.Plan.load(tmp_path / "plan.json", graph))
    assert (trace.cost, trace.peak_bytes) == (made["made"]["cost"], made["made"]["peak_bytes"]) == (4, 24)
    assert none["note"].startswith("INFEASIBLE: ")
