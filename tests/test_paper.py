"""The paper's figures and tables: numbers against hand-computed ones, and the whole run on a chain."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import sweep_helpers
from hydra import compose, initialize_config_dir

import remat
from analysis.paper import sweeps
from analysis.published import PUBLISHED
from experiments import cli
from experiments.checkmate import stored_study
from experiments.config import CONF_FOLDER, as_dict, register
from experiments.paper.rounding import count_feasible, valid_samples
from experiments.paper.stages import BUDGETS, LAYERS, solve_published, unit_chain
from experiments.paper.sweeps import spread
from experiments.registry import experiments
from experiments.settings import read_settings
from remat.graph import Graph
from remat.plan import Plan
from remat.programs.highs import solve_program
from remat.programs.published import build
from remat.registry import get_strategy
from remat.search.exhaustive import exhaustive
from remat.simulator import plain_peak, simulate

FAST = ["scale=quick", "networks=[chain]", "points=2", "time_limit=1", "strategies=[checkpoint_all,chen_sqrtn,search]"]


@pytest.fixture
def here(here: Path) -> Path:
    register()
    return here


@pytest.mark.parametrize(("layers", "budget"), [(2, 3), (3, 5)])
def test_both_forms_of_the_published_milp_have_the_optimum_of_an_exhaustive_search(layers: int, budget: int) -> None:
    graph = unit_chain(layers)
    optimum = exhaustive(graph, budget).bound
    staged, free = (
        solve_published(graph, budget, frontier_advancing=advancing, time_limit_s=60) for advancing in (True, False)
    )
    assert (staged["proven"], free["proven"]) == (True, True)
    assert optimum == round(staged["cost"]) == round(free["cost"])  # of a chain: stages lose nothing
    assert free["lp"] < staged["lp"] <= optimum + 1e-6
    below = solve_published(graph, 2, frontier_advancing=True, time_limit_s=20)
    assert below["cost"] is None  # the largest working set is 3


def test_the_published_chain_has_the_published_integrality_gaps() -> None:
    graph, budget = unit_chain(LAYERS), BUDGETS[0]
    optimum = exhaustive(graph, budget).bound
    assert (len(graph), budget, optimum) == (17, 4, 26)
    for frontier_advancing, gap in ((True, 1.18), (False, 21.56)):
        program = build(graph, frontier_advancing=frontier_advancing).program(budget)
        relaxed = solve_program(replace(program, is_integer=None), {"time_limit": 60, "threads": 1})
        assert relaxed.optimal
        assert round(optimum / float(program.cost @ relaxed.x), 2) == gap


def training_chain(costs: list[int], sizes: list[int], skips: list[tuple[int, int]]) -> Graph:
    """A layer for each cost, some of which also read the output of an earlier one; a loss, and the gradients."""
    n = len(costs)
    reads = [sorted({*([k - 1] if k else []), *(i for i, j in skips if j == k)}) for k in range(n)]
    deps = [*reads, [n - 1]]
    for k in reversed(range(n)):
        later = [2 * n - j for j in range(n) if k in reads[j]] or [n]
        deps.append(sorted({k, *reads[k], *later}))
    bytes_, backward = [*sizes, 1, *reversed(sizes)], [2 * cost for cost in reversed(costs)]
    return Graph.from_nodes("chain", deps, bytes_, [*costs, 1, *backward],
                            backward=[k > n for k in range(2 * n + 1)], loss=n)  # fmt: skip


def orders_of(strategy: str, graph: Graph, budget: int) -> set[tuple[int, ...]]:
    """The order of every plan of a strategy."""
    if get_strategy(strategy).ignores_budget:
        return {tuple(member.plan.order.tolist()) for member in remat.family(graph, strategy)}
    plan = remat.solve(graph, budget, strategy, time_limit_s=20, isolate=False).plan
    return set() if plan is None else {tuple(plan.order.tolist())}


ONES = [1] * 12


@cache
def orders_of_a_chain(strategy: str) -> set[tuple[int, ...]]:
    return orders_of(strategy, training_chain(ONES, ONES, []), 9)


def handles_general_graphs(strategy: str) -> str:
    """Whether it saves memory on a graph without articulation points: yes; only on one with some: partly."""
    for cell, skips in (("yes", [(k, k + 3) for k in range(9)]), ("partly", [(k, k + 2) for k in range(0, 10, 3)])):
        graph = training_chain(ONES, ONES, skips)
        plain = plain_peak(graph)
        orders = orders_of(strategy, graph, plain - 2)
        if min(simulate(graph, Plan.from_order(graph, order)).peak_bytes for order in orders) < plain:
            return cell
    return "no"


def knows_costs(strategy: str) -> str:
    """Whether its plans change if what they repeat becomes expensive."""
    cheap = orders_of_a_chain(strategy)
    repeated = {k for order in cheap for k, runs in Counter(order).items() if runs > 1}
    costs = [50 if k in repeated else 1 for k in range(12)]
    if len(repeated) == 12:  # in one plan or another
        costs[0] = 1
    return "no" if orders_of(strategy, training_chain(costs, ONES, []), 9) == cheap else "yes"


def knows_memory(strategy: str) -> str:
    """Whether its plans change with the sizes; partly, if it takes no budget."""
    other = orders_of(strategy, training_chain(ONES, [8, 8, *ONES[2:]], []), 18)
    same = other == orders_of_a_chain(strategy)
    return "no" if same else "partly" if get_strategy(strategy).ignores_budget else "yes"


@pytest.mark.parametrize("strategy", PUBLISHED["checkmate"]["table_1"])
@pytest.mark.parametrize("column", range(3), ids=["general", "cost", "memory"])
def test_each_cell_of_table_1_is_what_the_strategy_does(strategy: str, column: int) -> None:
    if (strategy, column) == ("checkpoint_all", 0):  # it saves nothing anywhere, and has a plan for every graph
        assert orders_of(strategy, training_chain([1] * 4, [1] * 4, [(0, 2)]), 9)
        return
    cells = handles_general_graphs, knows_costs, knows_memory
    assert cells[column](strategy) == PUBLISHED["checkmate"]["table_1"][strategy][column]


def test_random_rounding_keeps_what_is_whole() -> None:
    graph = unit_chain(2)
    R, S = (matrix.astype(float) for matrix in exhaustive(graph, 4).plan.matrices(graph))
    kept = valid_samples(R, S, graph, 5, 0)  # nothing is random in it
    assert len(kept) == 5
    assert (kept[0][0] == (R > 0)).all()
    R[0] = 0  # its result is not there in the next stage
    assert not valid_samples(R, S, graph, 5, 0)
    assert count_feasible(graph, len(graph), 20, 0, 10.0) == 20  # all fits into the budget
    pair = Graph.from_nodes("pair", [[], [0]], [1, 1], [1, 1])
    # Stage 1 computes operation 1, which finds its input if it is held (1/2) or computed again (1/2): 3/4.
    R, S = np.array([[1.0, 0.0], [0.5, 1.0]]), np.array([[0.0, 0.0], [0.5, 0.0]])
    assert len(valid_samples(R, S, pair, 8000, 0)) == pytest.approx(6000, abs=200)


@pytest.fixture(autouse=True)
def no_kept_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.store.KEPT_FOLDER", tmp_path / "results")


@pytest.mark.parametrize(
    ("given", "words"),
    [("parts=[fig7]", "fig7"), ("networks=[]", "empty"), ("networks=[torch_gpt2]", "Keras layers")],
)
def test_unknown_names_are_one_line(here: Path, given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["experiment=paper", "scale=quick", given]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("parts", ["rounding,memory,fig5", pytest.param("fig6,stages", marks=pytest.mark.slow)])
def test_a_part_runs_is_drawn_and_is_not_measured_again(
    here: Path, parts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["experiment=paper", f"parts=[{parts}]", *FAST]
    assert cli.main(command) == 0
    page = (here / "runs" / "paper" / "paper.md").read_text()
    if "memory" in parts:
        assert page.startswith("`scale=quick`: 2 budgets of a sweep, 1 s for each solve")
        assert "Cost over the optimum" in page  # Table 2, of the rows of Figure 5
        assert {path.stem for path in (here / "runs" / "paper").glob("*.csv")} > {"paper_table2", "paper_rounding"}
        assert (here / "runs" / "paper" / "figures" / "paper_memory_over_time.pdf").is_file()  # it replays plans
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "0 cases measured now" in capsys.readouterr().out
    assert (here / "runs" / "paper" / "paper.md").read_text() == page


def test_a_full_run_has_the_artifacts_budgets_and_its_start(here: Path) -> None:
    assert spread(1_000_500, 1_004_500, 4, 1_000_000) == [1_001_000, 1_002_000, 1_003_000, 1_004_000]
    assert spread(5_000, 8_000, 2, 0) == [5_000, 7_000]  # 6,500, rounded up
    command = ["experiment=paper", "parts=[fig5]", "networks=[chain]", "points=3", "time_limit=1",
               "strategies=[checkpoint_all,checkmate_milp]"]  # fmt: skip
    assert cli.main(command) == 0
    study = stored_study()
    (sweep,) = sweeps.sweeps(study.document("fig5"), study)
    budgets = sorted({int(budget) for budget in sweep.run.rows["budget_bytes"]})
    plain = int(sweep.run.rows["store_all_peak_bytes"].iloc[0])
    assert 5 <= len(budgets) <= 7  # three and three, and checkpoint-all's peak
    assert plain in budgets
    assert all(budget % 1000 == 0 for budget in budgets if budget != plain)


def test_the_milp_starts_from_the_cheapest_heuristic_that_fits(tmp_path: Path) -> None:
    _, _, graph_run = sweep_helpers.sweep(tmp_path)
    cold = graph_run.key("checkmate_milp", 8)
    families = graph_run.run_families(["checkpoint_all", "chen_sqrtn"])
    graph_run.starts = {"checkmate_milp": tuple(families.values())}
    assert graph_run.key("checkmate_milp", 8) != cold  # other rows than those of a cold start
    cheapest = min(m.cost for family in families.values() for m in family.members if m.peak_bytes <= 8)
    plan = graph_run.cheapest_below({}, "checkmate_milp", 8)
    assert simulate(sweep_helpers.MIRROR, plan).cost == cheapest
    assert graph_run.cheapest_below({}, "checkmate_milp", 1) is None
    assert graph_run.cheapest_below({}, "search", 8) is None  # the others start as users' do


def test_a_full_run_rounds_within_the_time_limit(here: Path) -> None:
    listed = experiments()["paper"]
    for asked, limits in (([], (3600, 3600)), (["scale=study", "time_limit=60"], (30, 60))):
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            cfg = compose("config", ["experiment=paper", "networks=[chain]", *asked])
        amount = next(listed.load().cases(read_settings(cfg), **listed.arguments(as_dict(cfg)))).what["amount"]
        assert (amount["time_limit_s"], amount["rounding_s"]) == limits
