"""MONeT's published costs, schedules and experiment: files of our own with costs by hand; every published objective."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers import refused

import remat
from experiments import cli
from experiments.config import register
from experiments.measure_solve import LIMITS
from experiments.monet import measured, ordered, page, plain_step, problems
from experiments.store import Table
from remat.cli import main
from remat.frontends.monet import load_costs, load_schedules
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate

KIB = 1024


def operation(kind: str, size: int, reads: list[int], fixed: int = 10, **more: Any) -> dict[str, Any]:
    """A node of the file; sizes in KiB."""
    name, kib = f"{kind}.n", {"bytes": size * KIB, "fixed_bytes": fixed * KIB}
    return {"name": name, "kind": kind, **kib, "reads": reads, "held": reads, "held_bytes": 0, **more}


OPERATIONS = [
    operation("convolution", 4, [], has_algorithms=True),
    operation("batch_norm", 4, [0]),
    operation("relu", 4, [1], may_overwrite=1),
    operation("loss", 1, [2]),
    operation("relu_ip_grad", 4, [1, 3]),
    operation("batch_norm_ip_grad", 4, [0, 4], fixed=11),
    operation("convolution_param_grad", 0, [5], fixed=13, has_algorithms=True),
]
ALGORITHMS = [{"name": "default"}, *({"name": f"algorithm_{c}"} for c in range(3))]
IMPLEMENTATIONS = [
    ALGORITHMS, [{"name": "input"}], [{"name": "input"}, {"name": "mask", "makes": [-1]}], [{"name": "default"}],
    [{"name": "input"}, {"name": "output", "reads": [2, 3]}, {"name": "mask", "reads": [-1, 3]}],
    [{"name": "input"}], ALGORITHMS,
]  # fmt: skip
COSTS = [
    {"t": [5.0, 3.0, -1000.0], "w": [0, 6 * KIB, 0], "p": [1, 2, 3]},
    {"t": [2.001], "w": [100], "rt": [1.5], "rw": [0], "p": [0]},
    {"t": [1.0, 1.0], "w": [0, 0], "it": [0.9, 0.9], "iw": [-4 * KIB, -4 * KIB], "p": [0, 1]},
    {"t": [0.0], "w": [0], "p": [0]},
    {"t": [1.0, 1.25, 1.75], "w": [0, 0, 0], "p": [0, 1, 2]},
    {"t": [3.0], "w": [-4 * KIB], "p": [0]},
    {"t": [4.0, 6.0, 9.0], "w": [8 * KIB, 0, 0], "p": [1, 2, 3]},
]
SET = {
    "name": "all", "mode": "inplace_conv_multiway_newnode", "in_place": True, "algorithms": True,
    "output_activated": True, "intermediate_activated": True, "operations": COSTS,
    "intermediates": [{"t": [0.5], "w": [0]}],
}  # fmt: skip
NORMAL = {
    **SET, "name": "normal", "mode": "normal",
    "operations": [{"t": each["t"][:1], "w": each["w"][:1], "p": [0]} for each in COSTS],
    **dict.fromkeys(("in_place", "algorithms", "output_activated", "intermediate_activated"), False),
}  # fmt: skip
FILE = {
    "format": "monet-costs", "version": 1, "network": "small", "batch": 2, "device": "none", "loss": 3,
    "operations": OPERATIONS, "implementations": IMPLEMENTATIONS, "sets": [SET, NORMAL],
    "intermediates": [{"id": -1, "operation": 2, "name": "mask", "bytes": 100, "held": [2], "held_bytes": 0}],
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return written(tmp_path / "costs_small.json", FILE)


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def place(graph: Graph, name: str) -> int:
    return [op.name for op in graph.operations].index(name)


def test_costs_sizes_implementations_and_the_peak_of_a_plan_follow_the_file(path: Path) -> None:
    graph = load_costs(path)
    assert (graph.name, graph.cost_unit, graph.fixed_bytes) == ("small_b2_icmn", "ns", 10 * KIB)
    assert {op.name: (op.cost, op.workspace_bytes) for op in graph.operations} == {
        "convolution.n": (3_000_000, 6 * KIB),  # no algorithm_4: the fastest
        "batch_norm.n:statistics": (510_000, KIB),  # 2.001 ms, rounded up to 2.01, less 1.5 when computed again
        "batch_norm.n": (1_500_000, 0),
        "relu.n": (1_000_000, 0),
        "loss.n": (0, 0),
        "relu_ip_grad.n": (1_000_000, 0),
        "batch_norm_ip_grad.n": (3_000_000, 0),
        "convolution_param_grad.n": (6_000_000, 0),  # algorithm_1
    }
    named = {op.name: {each.name: each.cost for each in op.implementations} for op in graph.operations}
    assert named["convolution.n"] == {"algorithm_0": 5_000_000}  # the third failed
    assert named["relu.n"] == {"in_place": 900_000, "mask": 1_500_000, "in_place_mask": 1_400_000}
    assert named["relu_ip_grad.n"] == {"output": 1_250_000, "mask": 1_750_000}
    assert named["batch_norm_ip_grad.n"] == {"over_gradient": 3_000_000}
    assert [value.bytes for value in graph.values if value.keep] == [KIB, 2 * KIB]  # gradients of parameters
    assert graph.values[-1].bytes == KIB  # the mask, rounded up
    trace = simulate(graph, by_hand(graph))
    assert trace.cost == 3_000_000 + 2_010_000 + 1_400_000 + 1_750_000 + 5_000_000 + 3_000_000 + 6_000_000
    # convolution and its workspace; with its statistics; with batch norm; relu over it and its mask; with the loss;
    # mask, loss and a gradient; convolution again beside the gradient; over it, and a parameter's gradient; the other.
    assert (trace.running_bytes // KIB).tolist() == [20, 15, 18, 15, 16, 16, 18, 19, 17]


def by_hand(graph: Graph) -> Plan:
    steps = [
        ("convolution.n", ""), ("batch_norm.n:statistics", ""), ("batch_norm.n", ""), ("relu.n", "in_place_mask"),
        ("loss.n", ""), ("relu_ip_grad.n", "mask"), ("convolution.n", "algorithm_0"),
        ("batch_norm_ip_grad.n", "over_gradient"), ("convolution_param_grad.n", ""),
    ]  # fmt: skip
    return Plan.from_order(graph, [place(graph, name) for name, _ in steps], 20 * KIB, [how for _, how in steps])


SCHEDULE = {
    "file": "net/solution_small_2_x_0.00.pkl", "program": "monet", "mode": "inplace_conv_multiway_newnode",
    "set": "all", "budget_kib": 20, "stored": {"total": 2216}, "run": [[0, 1, 2, -1, 3], [], [0], []],
    "backward": [2, 0, 0], "algorithms": [[0, 0, 1], [2, 0, 0], [3, 6, 1]], "in_place": [[0, 2]],
}  # fmt: skip
SCHEDULES = {
    "format": "monet-solutions", "costs": "costs_small.json",
    "solutions": [SCHEDULE, {**SCHEDULE, "program": "checkmate"}],
}  # fmt: skip


def test_published_schedules_become_plan_files_with_their_graph(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = written(tmp_path / "solutions_small.json", SCHEDULES), tmp_path / "out"
    assert main(["import-monet", str(tmp_path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    graph = remat.load_graph(out / "small_b2_icmn.json")
    assert graph.sha256() == load_costs(path).sha256()
    (plan,) = (out / "small_b2_icmn").iterdir()
    assert Plan.load(plan, graph).document() == by_hand(graph).document()
    written(file, {**SCHEDULES, "solutions": [{**SCHEDULE, "backward": [2]}]})
    assert main(["import-monet", str(file), "--out", str(out)]) == 1
    assert "solutions_small.json: is damaged" in capsys.readouterr().err


def test_kept_indices_of_pooling_move_from_scratch_memory_into_a_value(tmp_path: Path) -> None:
    document = copy.deepcopy(FILE)
    for k, kind in ((2, "aten::max_pool2d"), (4, "aten::max_pool2d_ip_grad")):
        document["operations"][k] |= {"kind": kind, "backward_of": 2 if k == 4 else None}
    document["sets"][0]["operations"][2] |= {"t": [0.4, 0.4], "w": [9 * KIB, 0]}
    document["sets"][0]["operations"][4] |= {"w": [8 * KIB, 0, 0]}
    costs = written(tmp_path / "costs_small.json", document)
    graph = load_costs(costs, "icmn+int64")
    pooling, gradient = (graph.operations[place(graph, name)] for name in ("relu.n", "relu_ip_grad.n"))
    (kept,) = (v for v, value in enumerate(graph.values) if value.name == "relu.n:indices_int64")
    assert graph.values[kept].bytes == 8 * KIB  # 8 bytes for each output of 4
    own = pooling.implementations[-1]
    assert (own.name, own.cost, own.workspace_bytes, own.outputs[-1]) == ("indices_int64", 400_000, KIB, kept)
    own = gradient.implementations[-1]
    assert (own.name, own.cost, own.workspace_bytes) == ("indices_int64", 600_000, 0)  # 1 ms less pooling again
    (of_loss,) = graph.operations[place(graph, "loss.n")].outputs
    assert own.inputs == (of_loss, kept)
    assert not any("int64" in value.name for value in load_costs(costs).values)


def test_levels_that_a_file_has_not_and_damage_are_refused_in_a_line(path: Path) -> None:
    with refused("unknown level 'x'"):
        load_costs(path, "x")
    with refused("has no costs inplace_normal; it has all"):
        load_costs(path, "i")
    for damage in ({"sets": None}, {"loss": "three"}, {"operations": OPERATIONS[:3]}, {"format": "other"}):
        with refused(r"costs_small\.json: is (damaged|no file)"):
            load_costs(written(path, FILE | damage))


def test_every_published_schedule_is_imported_and_costs_its_objective_within_its_budget(
    instances: Path, tmp_path: Path
) -> None:
    """ResNet50 has batch normalizations that were slower the second time."""
    count = 0
    for network, slack_ns in (("vgg16", 0), ("resnet50", 100_000), ("unet", 0)):
        for each in load_schedules(instances / "monet" / f"solutions_{network}.json.gz"):
            trace = simulate(each.graph, each.plan)
            assert 0 <= each.cost - trace.cost <= slack_ns, each.file
            assert trace.peak_bytes <= each.budget_bytes, each.file
            count += 1
    assert count == 75
    for kind in ("costs", "solutions"):
        (tmp_path / f"{kind}_vgg16.json.gz").symlink_to(instances / "monet" / f"{kind}_vgg16.json.gz")
    assert main(["import-monet", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    plans = [*tmp_path.glob("out/*/*.json")]
    assert len(plans) == 21
    for plan in plans:
        Plan.load(plan, remat.load_graph(plan.parent.with_suffix(".json")))


OUTCOME = {
    "objective_ms": 16.6, "bound_ms": 16.6, "seconds": 3.0, "status": "optimal", "best_incumbent_first_seen_s": 2,
}  # fmt: skip
SOLVED = {"network": "vgg16", "ablation": "icmn", "budget_gib": 1, "outcome": OUTCOME, "solves": []}
NOT_SOLVED = {"budget_gib": 1e-9, "outcome": {"status": "infeasible"}, "solves": [{"rows": 1234, "columns": 567}]}
RECORDS = {
    "published": {"vgg16": {"monet": [{"budget_gib": 1, "measured_gib": 0.9, "overhead_percent": -5.0}]}},
    "records": [SOLVED, SOLVED | NOT_SOLVED],
}


@pytest.fixture
def files(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of published files whose VGG-16 is the small network; the working directory is a fresh one, too."""
    folder = here / "instances" / "monet"
    folder.mkdir(parents=True)
    (folder / "costs_vgg16.json.gz").write_text(json.dumps(FILE))
    (folder / "records.json").write_text(json.dumps(RECORDS))
    monkeypatch.setattr("experiments.store.KEPT_FOLDER", here / "results")
    monkeypatch.setenv("REMAT_INSTANCES", str(here / "instances"))
    register()
    return folder


def test_a_run_has_the_logged_the_measured_and_our_numbers_in_one_row(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["experiment=monet", "networks=[vgg16]", "levels=[icmn]", "time_limit=5", "threads=1"]) == 0
    rows = Table("monet").rows()
    row, impossible = ordered(rows)
    # 3 + 2.01 + 1 + 0 + 1 + 3 + 4, because the gradient's default algorithm, of 6 ms, is not its fastest. Nothing is
    # faster: ReLU in place saves .1 ms, but its gradient from the output costs .25 ms more.
    assert row["plain_ms"] == row["cost"] / 1e6 == pytest.approx(14.01)
    assert (row["logged_ms"], row["logged_s"], row["logged_status"]) == (16.6, 3.0, "optimal")
    assert (row["measured_overhead_percent"], row["measured_gib"]) == (-5.0, 0.9)
    assert (row["backward_repeats"], row["threads"], row["level"]) == (0, 1, "icmn")
    assert impossible["status"] == "INFEASIBLE"
    ratios = {(each["operation"], each["implementation"]): each for each in rows if each["kind"] == "ratios"}
    assert (ratios["batch_norm", "again"]["ms"], ratios["batch_norm", "again"]["default_ms"]) == (1.5, 2.01)
    assert ratios["relu", "mask"]["ms"] == 1.5
    sizes = [each for each in rows if each["kind"] == "programs"]
    assert [(each["level"], each["logged_columns"], each["logged_rows"]) for each in sizes] == [
        ("icmn", 567, 1234), ("n", None, None)
    ]  # fmt: skip
    assert "| VGG-16 | 1 | 16.60 | 16.60 | 3 | optimal | 14.01 | -15.60 % |" in page(rows).text
    monkeypatch.delenv("REMAT_INSTANCES")  # without the files, a line says what is missing
    capsys.readouterr()
    assert cli.main(["experiment=monet"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plan_that_repeats_a_gradient_stands_beside_one_that_does_not(
    files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Graph]()

    def solved(graph: Graph, strategy: str, budget_bytes: int, **how: Any) -> Any:
        asked.append(graph)
        solution = remat.solve(graph, budget_bytes, "checkpoint_all")
        order = [*range(len(graph)), *([] if asked[1:] else [place(graph, "relu_ip_grad.n")])]
        return replace(solution, plan=Plan.from_order(graph, order))

    monkeypatch.setattr("experiments.monet.solved", solved)
    source = {"monet": "vgg16", "level": "icmn", "set": None}
    (row,) = measured(source, "search", 2**30, {}, **LIMITS)
    assert row["backward_repeats"] == 1
    assert row["once_ms"] == pytest.approx(16.01)  # 3 + 2.01 + 1 + 0 + 1 + 3 + 6
    assert [[op.run_once for op in graph.operations if op.is_backward] for graph in asked] == [[False] * 3, [True] * 3]


def test_each_problem_has_what_is_published_of_it(instances: Path) -> None:
    vgg16 = {each["budget_gib"]: each for each in problems(instances / "monet", "vgg16", "icmn")}
    assert [vgg16[gib]["logged_ms"] for gib in (10, 9, 5.5)] == [1324.00, 1329.17, 1540.23]
    assert [vgg16[gib]["measured_gib"] for gib in (10, 9, 5.5)] == [9.71, 8.66, 5.51]
    assert vgg16[5]["logged_ms"] is None
    assert {each["source"]["set"] for gib, each in vgg16.items() if gib != 5} == {"inplace_conv_multiway_newnode@1"}
    assert [each["logged_ms"] for each in problems(instances / "monet", "resnet50", "n")][:2] == [1080.48, 1090.42]
    assert len(problems(instances / "monet", "googlenet", "ic")) == 6  # without a log
    ours = problems(instances / "monet", "vgg16", "icmn+int64")
    assert [(each["budget_gib"], each["logged_ms"]) for each in ours] == [(gib, None) for gib in vgg16]
    assert problems(instances / "monet", "mobilenet_v2", "in") == []  # its costs are not published


@pytest.mark.parametrize(("network", "ms"), [("vgg16", 1247.68), ("resnet50", 879.43), ("mobilenet_v2", 585.46)])
def test_the_plain_step_is_the_sum_of_the_fastest_algorithms(network: str, ms: float, instances: Path) -> None:
    graph = load_costs(instances / "monet" / f"costs_{network}.json.gz")
    assert simulate(graph, plain_step(graph)).cost / 1e6 == pytest.approx(ms, rel=0.005)  # each cost is rounded up
