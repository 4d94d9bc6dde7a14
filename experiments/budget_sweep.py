"""The sweep: every strategy over budgets from the smallest with a known plan to checkpoint-all's peak."""

import remat
from experiments.solving import GraphRun, reuse_plans
from experiments.store import Row
from remat.incumbent import GAP_TOLERANCE
from remat.registry import get_strategy


def sweep_budgets(smallest_bytes: int, largest_bytes: int, points: int, *, by_factor: bool = False) -> list[int]:
    """[<= points] evenly spaced integer budgets, ascending, both ends included, each once.

    With `by_factor` they are even on a logarithmic scale: closer where memory is tight and overhead changes most.
    """
    largest_bytes = max(smallest_bytes, largest_bytes)
    span, last = largest_bytes - smallest_bytes, points - 1
    if by_factor and smallest_bytes:
        factor = largest_bytes / smallest_bytes
        inner = {round(smallest_bytes * factor ** (i / last)) for i in range(1, last)}
        return sorted({smallest_bytes, largest_bytes, *inner})
    return sorted({smallest_bytes + i * span // last for i in range(points)})


def through(budgets: list[int], wanted: int) -> list[int]:
    """`budgets` with `wanted` in place of the nearest inner one, if it lies between the ends."""
    inner = budgets[1:-1]
    if not inner or not budgets[0] < wanted < budgets[-1]:
        return budgets
    nearest = min(inner, key=lambda budget: abs(budget - wanted))
    return sorted([wanted, *(budget for budget in budgets if budget != nearest)])


def budgets_of_sweep(graph_run: GraphRun, *, by_factor: bool = False, at: int | None = None) -> list[int]:
    """The budgets of a sweep, see `sweep_budgets`; `at` is one of them if it lies between the ends."""
    graph_run.serves = graph_run.settings.points
    families = graph_run.run_families(graph_run.settings.strategies)  # first, because they determine the smallest
    peaks = [member.peak_bytes for family in families.values() for member in family.members]
    least = min([remat.min_budget(graph_run.subject.graph, graph_run.settings.scope).bytes, *peaks])
    budgets = sweep_budgets(least, graph_run.store_all_peak_bytes, graph_run.settings.points, by_factor=by_factor)
    return budgets if at is None else through(budgets, at)


def run_sweep(graph_run: GraphRun, *, by_factor: bool = False, at: int | None = None) -> tuple[list[Row], list[str]]:
    """(rows, keys of families) of a sweep, see `budgets_of_sweep`."""
    return sweep_rows(graph_run, budgets_of_sweep(graph_run, by_factor=by_factor, at=at)), family_keys(graph_run)


def sweep_rows(graph_run: GraphRun, budgets: list[int]) -> list[Row]:
    """A row for each strategy and budget; those of strategies that depend on the budget share plans."""
    rows: list[Row] = []
    for name, solved in _solved(graph_run, budgets).items():
        shared = reuse_plans(solved, GAP_TOLERANCE) if is_reusable(name) else solved
        known = {row.key for row in solved}
        for row in (row for row in shared if row.key not in known):
            graph_run.store.write_row(row)
        rows += shared
    return rows


def run_single(graph_run: GraphRun, budget_bytes: int) -> tuple[list[Row], list[str]]:
    """(rows, keys of families) at one budget."""
    solved = _solved(graph_run, [budget_bytes])
    return [row for name in graph_run.settings.strategies for row in solved[name]], family_keys(graph_run)


def _solved(graph_run: GraphRun, budgets: list[int]) -> dict[str, list[Row]]:
    """[strategy] its rows at these budgets, families first."""
    names = graph_run.settings.strategies
    families = graph_run.run_families(names)
    solved = {name: graph_run.family_rows(family, budgets) for name, family in families.items()}
    return solved | graph_run.run_budgets([name for name in names if name not in families], budgets)


def family_keys(graph_run: GraphRun) -> list[str]:
    """Keys of the families that have a plan."""
    families = graph_run.run_families(graph_run.settings.strategies)
    return [graph_run.key(name, None) for name, family in families.items() if family.members]


def is_reusable(name: str) -> bool:
    """Whether larger budgets may get its plans: never for a baseline, whose rows must be its own results."""
    chosen = get_strategy(name)
    return not chosen.ignores_budget and not chosen.is_baseline
