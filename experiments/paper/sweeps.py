"""Solves at several budgets: overhead against budget (Figure 5), solver times, and cost models compared."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from analysis.paper.sweeps import SOURCE
from analysis.results import PAPERS_HEURISTICS
from experiments.budget_sweep import family_keys, run_sweep, sweep_rows
from experiments.build import Subject
from experiments.paper.graphs import Context, Network, budgets_at, extracted, panel_of, published, subject_of
from experiments.solving import Asked, GraphRun, solve_each
from experiments.store import Row
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import simulate
from remat.solution import Family

PUBLISHED, OURS = "published", "ours"
ROUNDINGS = ("lp_rounding", "lp_rounding_search", "lp_rounding_random")
MILP = "checkmate_milp"
DENSE = ("vgg16", "vgg19")  # networks at which the artifact looks at twice as many budgets


def fig5(context: Context) -> dict[str, Any]:
    """Sweep every network from every source: first its published graph, if there is one."""
    return {"panels": [_sweep(context, *case) for case in _sources(context)], "has_starts": True}


def _sources(context: Context) -> Iterator[tuple[Network, str, Subject]]:
    for network in context.networks:
        known = published(context, network)
        if known is not None:
            yield network, PUBLISHED, known
        yield network, OURS, extracted(context, network)


def _sweep(context: Context, network: Network, source: str, subject: Subject) -> dict[str, Any]:
    """Sweep one graph; returns its panels.

    The MILP starts from the cheapest plan of a heuristic that fits, as in the artifact, whose heuristics hold their
    checkpoints to the end of the step.
    """
    context.print(f"{network.label}, {SOURCE[source]}")
    limits = dict.fromkeys(ROUNDINGS, context.scale.rounding_s) if network.has_slow_lp else {}
    graph_run = context.graph_run(subject, "paper/fig5", budget_bytes=None, time_limits=limits)
    artifact = context.graph_run(subject, "paper/fig5", budget_bytes=None, accounting="published")
    found = artifact.run_families([name for name in artifact.settings.strategies if get_strategy(name).ignores_budget])
    with_starts(graph_run)
    if context.scale.as_artifact:
        rows, families = _as_artifact(graph_run, found, 2 if network.name in DENSE else 1)
    else:
        rows, families = run_sweep(graph_run, by_factor=True, at=int(context.settings.gpu.memory_bytes))
    title = f"{network.label}{f', batch {subject.batch_size}' if subject.batch_size else ''}: {SOURCE[source]}"
    panel = panel_of(graph_run, rows, families, title)
    budgets = sorted({row.budget_bytes for row in rows})
    counted = [row for family in found.values() for row in artifact.family_rows(family, budgets)]
    held = panel_of(artifact, counted, [], title)
    return {"artifact": held, "panel": panel, "network": network.name, "label": network.label, "source": source}


def with_starts(graph_run: GraphRun) -> GraphRun:
    """The run, in which the MILP starts from the cheapest plan of the paper's heuristics that fits."""
    if MILP in graph_run.settings.strategies:
        graph_run.starts = {MILP: tuple(graph_run.run_families(PAPERS_HEURISTICS).values())}
    return graph_run


def _as_artifact(graph_run: GraphRun, held: Mapping[str, Family], times: int) -> tuple[list[Row], list[str]]:
    """(rows, keys of families) of a sweep at the artifact's budgets.

    Of those, `points` lie between the largest working set and the least peak without recomputation, as the artifact's
    heuristics `held` it; as many lie around the least memory of any plan found there.
    """
    graph, n = graph_run.subject.graph, times * graph_run.settings.points
    graph_run.serves = 2 * n
    families = graph_run.run_families(graph_run.settings.strategies)
    plain = min(m.peak_bytes for family in held.values() for m in family.members if m.cost == graph.total_cost)
    budgets = spread(graph.largest_working_set()[0], plain, n, graph.fixed_bytes)
    rows = sweep_rows(graph_run, [*budgets, graph_run.store_all_peak_bytes])
    peaks = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    least = min([*peaks, *(m.peak_bytes for family in families.values() for m in family.members)]) - graph.fixed_bytes
    around = spread(graph.fixed_bytes + least // 2, graph.fixed_bytes + 3 * least // 2, n, graph.fixed_bytes)
    rows += sweep_rows(graph_run, [budget for budget in around if budget not in budgets])
    return rows, family_keys(graph_run)


def spread(first: int, last: int, n: int, fixed: int) -> list[int]:
    """[n] budgets at even steps from `first` to before `last`; beside the fixed bytes each is rounded up to 1,000."""
    steps = (n * (first - fixed) + i * (last - first) for i in range(n))
    return [fixed + -(-step // (1000 * n)) * 1000 for step in steps]


FORMS = (
    ("Checkmate MILP, published form, HiGHS", MILP, {"formulation": "published"}),
    ("Checkmate MILP, trimmed, HiGHS", MILP, {"formulation": "trimmed"}),
    ("Portfolio", "portfolio", {}),
)
# [number of budgets] tenths of the way from the smallest budget to checkpoint-all's peak
SHARES = {1: (3,), 2: (2, 5), 3: (1, 3, 6), 4: (1, 3, 5, 7)}


def solver_time(context: Context) -> dict[str, Any]:
    """Solve each network at a few budgets in each form; the MILPs start as the artifact's, see `with_starts`.

    The seed is another than a sweep's, because rows of a sweep start from the plans of smaller budgets.
    """
    asked: list[Asked] = []
    of: list[dict[str, str]] = []
    for network in context.networks:
        subject = subject_of(context, network)
        budgets: list[int] = []
        for label, strategy, options in FORMS:
            graph_run = context.graph_run(
                subject, "paper/solver_time", strategies=(strategy,), options={strategy: options},
                seed=context.settings.seed + 1,
            )  # fmt: skip
            with_starts(graph_run)
            budgets = budgets or budgets_at(graph_run, SHARES[context.scale.solver_points])
            asked += [Asked(graph_run, strategy, budget, partial(graph_run.cheapest_below, {}, strategy, budget))
                      for budget in budgets]  # fmt: skip
            of += [{"form": label, "network": network.label}] * len(budgets)
    rows = [{"key": row.key, **entry} for row, entry in zip(solve_each(asked), of, strict=True)]
    return {"rows": rows, "has_starts": True}


COMPARED = ("vgg16", "mobilenet", "unet", "resnet50", "vgg19")
# The cost models compared at the published batch, and at a batch at which a CPU can run every operation.
COSTS = {None: ("flops", "roofline"), 2: ("flops", "roofline", "profile")}
STEPS = (1, 3, 6)  # tenths of the way from the smallest budget to checkpoint-all's peak


def cost_models(context: Context) -> dict[str, Any]:
    """Solve at a few budgets under each cost model, and judge every plan by the costs of the others."""
    rows, skipped = list[dict[str, Any]](), list[str]()
    for network in context.networks:
        if network.name in COMPARED:
            for batch in COSTS:
                _compare(context, network, batch, rows, skipped)
    return {"rows": rows, "skipped": skipped}


def _compare(
    context: Context, network: Network, batch: int | None, rows: list[dict[str, Any]], skipped: list[str]
) -> None:
    """Add a row for each budget, model that chose and model that judges, and a line for each budget without a plan."""
    costs, plans, budgets = COSTS[batch], dict[tuple[str, int], Any](), list[int]()
    subjects = {cost: extracted(context, network, cost=cost, batch_size=batch) for cost in costs}
    for cost, subject in subjects.items():
        graph_run = context.graph_run(subject, "paper/cost_models", strategies=("portfolio",))
        budgets = budgets_at(graph_run, STEPS)
        for row in graph_run.run_budgets(["portfolio"], budgets)["portfolio"]:
            if row.cost is None:
                skipped.append(f"{network.label}, batch {subject.batch_size}, {cost} costs: {row.status} {row.message}")
            else:
                plans[cost, row.budget_bytes] = context.run.store.read_plan(row, subject.graph), row.gap
    for judge, subject in subjects.items():
        for step, budget in zip(STEPS, budgets, strict=True):
            found = {cost: plans[cost, budget] for cost in costs if (cost, budget) in plans}
            # The same computations in the same order, with the judge's costs.
            spent = {cost: simulate(subject.graph, Plan.from_order(subject.graph, plan.order.tolist())).cost
                     for cost, (plan, _) in found.items()}  # fmt: skip
            rows += [
                {"network": network.label, "batch": subject.batch_size, "step": step, "budget_bytes": budget,
                 "chosen_under": cost, "judged_by": judge, "cost": value, "best": min(spent.values()),
                 "gap": found[cost][1]} for cost, value in spent.items()
            ]  # fmt: skip
