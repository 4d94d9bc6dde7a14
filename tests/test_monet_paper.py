"""MONeT's figures and tables: numbers against hand-made ones, errors in one line, and a run of one network."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from analysis.monet.points import GIB, Point, cheapest, contained
from analysis.monet.solving import timed
from analysis.parts import Study
from experiments import cli
from experiments.config import register
from experiments.monet import algorithms
from experiments.monet.implementations import available, count, reason
from experiments.monet.published import NETWORKS
from experiments.store import Store
from experiments.table import Table
from remat.frontends.monet import BATCHES, monet_graph, plain_pytorch
from remat.graph import Graph, Operation, Value
from remat.implementation import Implementation
from remat.plan import Plan
from remat.solution import Family, Member

RUN = ["experiment=monet", "scale=quick", "networks=[vgg16]", "time_limit=1.5", "budget=[10GiB,9GiB]"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.delenv("REMAT_INSTANCES", raising=False)
    register()
    return tmp_path


def test_published_numbers_are_whole() -> None:
    assert {name: network.batch for name, network in NETWORKS.items()} == BATCHES
    for network in NETWORKS.values():
        assert len(network.budgets_gib) == len(network.overheads_percent) == 6
        assert list(network.overheads_percent) == sorted(network.overheads_percent)
    assert NETWORKS["resnet50"].budgets_bytes[0] == 10_737_418_240  # the unit of the recorded results


def test_plain_pytorch_needs_what_was_published_only_in_gib() -> None:
    for name in ("resnet50", "unet"):
        graph = monet_graph(name)
        peak = remat_peak(graph, plain_pytorch(graph))
        assert peak / GIB == pytest.approx(NETWORKS[name].pytorch_gib, rel=0.01)


def test_measured_algorithms_cost_the_logged_share_of_the_default() -> None:
    plain = monet_graph("vgg16", winograd=False, ratios="p100")
    graph = algorithms.with_algorithms(plain)
    convolutions = [k for k, op in enumerate(graph.operations) if op.kind.startswith("aten::_convolution")]
    assert len(convolutions) == 3 * 13
    shares = {
        (one.name, round(one.workspace_bytes / 2**20, 1)): one.cost / graph.operations[2].cost
        for one in graph.operations[2].implementations  # the second convolution, of 64 channels
    }
    assert shares == {
        ("algorithm_6", 0.4): pytest.approx(70.81 / 95.05), ("algorithm_7", 9702.6): pytest.approx(68.87 / 95.05),
    }  # fmt: skip
    first_backward = next(k for k in convolutions if graph.operations[k].is_backward)  # weights of the last one
    assert [one.name for one in graph.operations[first_backward].implementations] == ["algorithm_4"]
    assert [op.cost for op in graph.operations] == [op.cost for op in plain.operations]
    relu = next(op for op in graph.operations if op.kind == "aten::relu__ip_grad")  # the last, after dropout
    over = [one for one in relu.implementations if one.overwrites is not None]
    assert {one.name for one in over} == {"in_place_default", "in_place_output", "in_place_mask"}
    assert {graph.operations[graph.producer[one.overwrites or 0]].kind for one in over} == {"aten::dropout_ip_grad"}
    pools = [op for op in graph.operations if op.kind.startswith("aten::max_pool2d")]
    first = graph.values[pools[0].outputs[0]].bytes
    assert pools[0].workspace_bytes == pools[-1].workspace_bytes == 2 * first
    for gib, logged in algorithms.LOGGED.items():  # a step of PyTorch follows from each budget: they must agree
        published = dict(zip(NETWORKS["vgg16"].budgets_gib, NETWORKS["vgg16"].overheads_percent, strict=True))
        assert logged.measured_ms / (1 + published[gib] / 100) == pytest.approx(algorithms.pytorch_ms(), rel=0.01)
        assert logged.program_ms == pytest.approx(logged.measured_ms, rel=0.02)


def remat_peak(graph: Graph, plan: Plan) -> int:
    from remat import simulate

    return simulate(graph, plan).peak_bytes


def relu_chain() -> Graph:
    """Operation b -> relu r -> loss -> relu's backward, which reads b's value, a mask, or r's value."""
    forward = (
        Implementation("mask", (0,), (1, 4), 12),
        Implementation("dear_mask", (0,), (1, 4), 13),
    )
    backward = (Implementation("mask", (2, 4), (3,), 10), Implementation("output", (1, 2), (3,), 20))
    operations = (
        Operation("b", "base", (), (0,), 10),
        Operation("r", "relu", (0,), (1,), 10, implementations=forward),
        Operation("loss", "loss", (1,), (2,), 1),
        Operation("rb", "relu_ip_grad", (0, 2), (3,), 10, is_backward=True, implementations=backward),
    )
    values = tuple(Value(str(i), size) for i, size in enumerate((100, 100, 10, 100, 4)))
    return Graph("chain", operations, values, loss=2)


def test_why_an_implementation_is_not_used() -> None:
    graph = relu_chain()
    default = Plan.from_order(graph, range(4))
    masked = Plan.from_order(graph, range(4), implementations=["", "mask", "", "mask"])
    assert available(graph) == {("relu", "mask"): 1, ("relu", "dear_mask"): 1, ("relu_ip_grad", "mask"): 1,
                                ("relu_ip_grad", "output"): 1}  # fmt: skip
    assert count(graph, masked) == {("relu", "mask"): 1, ("relu_ip_grad", "mask"): 1}
    assert count(graph, default) == {}
    assert reason(graph, {300: masked}, "relu", "dear_mask").startswith("dominated: mask ")
    # 31 -> 41, and r's value is as large as b's
    assert reason(graph, {300: default}, "relu_ip_grad", "output").startswith(
        "slower, and its saving is not at the peak"
    )
    # 31 -> 33; at the peak, relu's backward, the mask's 4 bytes stand for b's 100, and 204 are held when relu runs
    assert "+6.45 % time, -6 B at the peak" in reason(graph, {300: default}, "relu", "mask")


def point(**changes: Any) -> Point:
    base = Point("vgg16", "none", "portfolio", 8, "FEASIBLE", 110, 100, 0.1, 8, 5.0, 9.0, (), {})
    return replace(base, **changes)


def test_a_plan_counts_wherever_it_fits() -> None:
    points = [point(), point(budget_bytes=9, peak_bytes=9, cost=120), point(cost=None, peak_bytes=None)]
    best = cheapest(points, 9)
    assert best is not None
    assert best.cost == 110
    assert cheapest(points, 7) is None
    levels = [point(level="output", overhead=0.2), point(level="none"), point(level="cpu", cost=None, overhead=None)]
    inside = contained(levels, "vgg16", "cpu", 8)
    assert inside is not None
    assert inside.level == "none"
    assert contained(levels, "vgg16", "output", 7) is None


def test_times_are_to_the_best_of_both_solvers() -> None:
    first, second, third = timed([
        point(trajectory=((1.0, 200), (2.0, 104), (3.0, 100)), cost=100),
        point(strategy="monet", cost=104, stats={"start_cost": 105}),
        point(strategy="monet", cost=104, stats={"start_cost": 104}),
    ])  # fmt: skip
    assert (first.first_s, first.near_s) == (1.0, 2.0)
    assert (second.first_s, second.near_s) == (5.0, 5.0)  # its plan came with the answer
    assert (third.first_s, third.near_s) == (None, None)  # its plan is the one from which it started
    assert timed([point(cost=None)])[0].near_s is None


def test_the_store_keeps_the_implementations_of_a_family(tmp_path: Path) -> None:
    graph = relu_chain()
    plan = Plan.from_order(graph, range(4), implementations=["", "mask", "", "mask"])
    store = Store(tmp_path)
    store.write_family("key", Family("gist", (Member(plan, 33, 204, {}),)), graph, "exact")
    family = store.read_family("key", "gist", graph)
    assert family is not None
    assert family.members[0].plan.steps == plan.steps


@pytest.mark.slow
def test_a_run_is_drawn_and_is_not_measured_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("experiments.table.KEPT_FOLDER", here / "results")
    assert cli.main(RUN) == 0
    assert "records: skipped, the published graphs are not at hand" in capsys.readouterr().out
    folder = here / "runs" / "monet"
    assert (folder / "figures" / "overhead.pdf").is_file()
    table = (folder / "monet_overhead.csv").read_text().splitlines()
    assert [line.split(",")[:3] for line in table[1:]] == [["VGG-16", "10", "-5.30 %"], ["VGG-16", "9", "-4.64 %"]]
    document = Study.of(Table("monet").rows(), folder).document("overhead")
    assert {row["strategy"] for row in document["rows"]} == {"checkmate_milp", "portfolio", "monet", "gist"}
    assert cli.main(RUN) == 0
    assert "0 cases measured now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "words"),
    [("networks=[vgg17]", "vgg16"), ("networks=[]", "empty"), ("levels=[outputs]", "output"), ("levels=[]", "empty"),
     ("parts=[fig5]", "fig5"), ("batch_size=3", "leave out batch_size"), ("instances=nowhere", "no such folder"),
     ("budget=[]", "empty list"), ("scope=free", "staged")],
)  # fmt: skip
def test_what_is_mistyped_is_one_line(here: Path, given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment=monet", "scale=quick", given]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_other_experiments_take_one_budget(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model=chain", "budget=[1GB,2GB]"]) == 1
    assert "experiment=monet" in capsys.readouterr().err
