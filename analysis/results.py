"""A stored run: its rows, families, graph and plans, and the plans to show; never runs a solver."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pandas as pd

from analysis.style import order_of, style_of
from remat.errors import InvalidInput, InvalidPlan
from remat.files import read_json as read_plain_json
from remat.files import read_table
from remat.frontends.json import load_graph
from remat.graph import Graph
from remat.plan import Plan, frees_held_to_end
from remat.simulator import Trace, load_and_simulate, simulate
from remat.units import format_size

MAX_PLANS = 40  # of a page
MAX_STEPS = 400_000  # over all plans of a page
# A pandas DataFrame. With its own types, a type checker rejects each use of a cell or of a row of itertuples().
Frame: TypeAlias = Any

WITH_PLAN = ("OPTIMAL", "FEASIBLE")
ROW_COLUMNS = (
    "key", "graph_sha256", "strategy", "budget_bytes", "status", "cost", "bound", "gap", "overhead",
    "peak_bytes", "plan_file", "plan_from", "message", "wall_s", "scope", "accounting", "cost_unit", "total_cost",
)  # fmt: skip
RATIOS = ("gap", "overhead", "wall_s", "time_limit_s")
NUMBERS = (
    "budget_bytes", "cost", "bound", "peak_bytes", "plan_from", "total_cost", "store_all_peak_bytes", "fixed_bytes",
    "plain_peak_bytes",
    "n_operations", "n_edges", "gpu_memory_bytes", "batch_size", "seed", "threads", "peak_bound_bytes", "cost_cap",
    *RATIOS,
)  # fmt: skip
PAPERS_HEURISTICS = (  # those that Checkmate compares itself with
    "checkpoint_all", "checkpoint_all_ap", "checkpoint_last", "griewank", "chen_sqrtn", "chen_greedy", "ap_sqrtn",
    "ap_greedy",
)  # fmt: skip
FAMILY_COLUMNS = ("strategy", "graph_sha256", "parameters", "cost", "overhead", "peak_bytes", "accounting")


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """The content of a run folder and its store.

    Attributes:
        folder: the folder of the run; figures go there.
        info: the content of run.json.
        rows: one row per solve, sorted by strategy and budget; columns as in the store.
        families: one row per member of a strategy that ignores the budget; may be empty.
        graph: the graph in the figures, or None if the run stored none.
        store: folder of rows, plans and graphs.
        missing: keys in run.json without a row in the store, because the run was stopped early.
    """

    folder: Path
    info: dict[str, Any]
    rows: Frame
    families: Frame
    graph: Graph | None
    store: Path
    missing: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return str(self.info.get("title") or self.folder.name)

    @property
    def gpu_name(self) -> str:
        return str((self.info.get("gpu") or {}).get("name") or "GPU")

    @property
    def gpu_memory_bytes(self) -> int | None:
        given = (self.info.get("gpu") or {}).get("memory_bytes")
        return None if given is None else int(given)

    @property
    def cost_unit(self) -> str:
        if self.graph is not None:
            return self.graph.cost_unit
        return str(self.rows["cost_unit"].iloc[0]) if len(self.rows) else ""

    @property
    def total_cost(self) -> int:
        """Cost of running every operation once."""
        if self.graph is not None:
            return self.graph.total_cost
        return int(self.rows["total_cost"].iloc[0]) if len(self.rows) else 0

    @property
    def planned(self) -> Frame:
        """The rows with a plan."""
        return self.rows[self.rows["status"].isin(WITH_PLAN) & self.rows["cost"].notna()]

    @property
    def strategies(self) -> list[str]:
        """Names in the order of the figures."""
        return sorted(self.rows["strategy"].unique().tolist(), key=order_of)

    def load_plan(self, row: Any) -> tuple[Plan, Trace] | None:
        """The stored plan of a row with its trace, or None if the row has none.

        Raises:
            InvalidPlan: the file is malformed, made for another graph, or not the plan of that row; names the file.
        """
        file = row.plan_file
        if self.graph is None or not isinstance(file, str) or row.graph_sha256 != self.graph.sha256():
            return None
        plan, trace = load_and_simulate(self.store / file, self.graph)
        if (trace.cost, trace.peak_bytes) != (int(row.cost), int(row.peak_bytes)):
            raise InvalidPlan(f"{self.store / file}: is not the plan of its row; run the same command again to mend it")
        return plan, trace


def load_run(folder: Path) -> Run:
    """Read a run folder.

    Raises:
        InvalidInput: there is no such run, or one of its files cannot be read; names the file.
    """
    folder = Path(folder)
    info = read_json(folder / "run.json")
    store = (folder / str(info.get("store", "../store"))).resolve()
    if not store.is_dir():
        raise InvalidInput(f"{folder / 'run.json'}: its store {store} does not exist")
    rows, missing = _read_tables(store / "rows", info.get("keys", []), ROW_COLUMNS)
    families, _ = _read_tables(store / "families", info.get("families", []), FAMILY_COLUMNS)
    rows = rows.sort_values(["strategy", "budget_bytes", "key"], kind="stable", ignore_index=True)
    if info.get("graph_sha256") is None and len(rows):
        info["graph_sha256"] = rows["graph_sha256"].mode().iloc[0]
    sha = info.get("graph_sha256")
    families = families[families["graph_sha256"] == sha].reset_index(drop=True) if sha else families
    path = store / "graphs" / f"{sha}.json"
    graph = load_graph(path) if sha and path.exists() else None
    return Run(folder, info, rows, families, graph, store, missing)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run folder."""
    if not path.exists():
        raise InvalidInput(f"{path.parent} is not a run folder: it has no {path.name}")
    info = read_plain_json(path)
    if not isinstance(info, dict):
        raise InvalidInput(f"{path}: must hold a JSON object")
    return info


def distinct(rows: Frame, column: str) -> list[str]:
    """The texts in a column without '' and repeats, sorted; none where the rows lack the column."""
    return sorted({str(value) for value in rows[column].dropna()} - {""}) if column in rows else []


def as_objects(rows: Frame) -> Iterator[Any]:
    """Each row as an object with the columns as attributes; an absent value is None."""
    return rows.astype(object).where(rows.notna(), None).itertuples()


def _read_tables(folder: Path, keys: list[str], columns: tuple[str, ...]) -> tuple[Frame, tuple[str, ...]]:
    """(the tables of these keys in one, the keys without a table)."""
    paths = {key: folder / f"{key}.parquet" for key in keys}
    found, missing = list[dict[str, Any]](), tuple(key for key, path in paths.items() if not path.exists())
    for path in filter(Path.exists, paths.values()):
        table = read_table(path)
        if absent := [column for column in columns if len(table) and column not in table.column_names]:
            raise InvalidInput(f"{path}: lacks the columns {', '.join(absent)}")
        found += table.to_pylist()
    return frame_of(found, columns), missing


def frame_of(records: list[dict[str, Any]], columns: tuple[str, ...] = ()) -> Frame:
    """A table with numbers in nullable columns; without records, a table of empty `columns`."""
    if not records:
        return pd.DataFrame({column: pd.Series(dtype=object) for column in columns})
    frame: Frame = pd.DataFrame(records)
    for column in NUMBERS:
        if column in frame:
            frame[column] = pd.array(frame[column].tolist(), dtype="Float64" if column in RATIOS else "Int64")
    return frame


@dataclass(frozen=True, slots=True, eq=False)
class ShownPlan:
    """A stored plan with its row and its trace."""

    row: Any
    plan: Plan
    trace: Trace

    @property
    def strategy(self) -> str:
        return str(self.row.strategy)

    @property
    def title(self) -> str:
        return f"{style_of(self.strategy).label} at {format_size(int(self.row.budget_bytes))}"


def store_all(graph: Graph, accounting: str) -> Trace:
    """The trace of checkpoint-all, which is plain training."""
    order = range(len(graph))
    if accounting == "published":
        return simulate(graph, Plan.from_steps(graph, frees_held_to_end(graph, order, range(len(graph.values)))))
    return simulate(graph, Plan.from_order(graph, order))


def chosen_plan(run: Run) -> ShownPlan | None:
    """The plan of the printed figures: the cheapest at the middle one of the budgets that need recomputation.

    Ties go to a proven plan, then to the strategy further down the legend (exact and combined strategies).
    """
    rows = [row for row in run.planned.itertuples() if isinstance(row.plan_file, str)]
    working = [row for row in rows if row.overhead > 0] or rows
    budgets = sorted({int(row.budget_bytes) for row in working})
    if not budgets or run.graph is None:
        return None
    middle = budgets[(len(budgets) - 1) // 2]
    at_middle = [row for row in working if int(row.budget_bytes) == middle]
    best = min(
        at_middle,
        key=lambda row: (int(row.cost), row.status != "OPTIMAL", -order_of(row.strategy)[0], row.strategy, row.key),
    )
    return _shown(run, best)


def page_plans(run: Run) -> list[ShownPlan]:
    """Each strategy's cheapest plan at up to three budgets (tight, middle, wide), within the limits of a page."""
    rows = [row for row in run.planned.itertuples() if isinstance(row.plan_file, str)]
    budgets = sorted({int(row.budget_bytes) for row in rows if row.overhead > 0} or {int(r.budget_bytes) for r in rows})
    if not budgets or run.graph is None:
        return []
    picked = {budgets[0], budgets[(len(budgets) - 1) // 2], budgets[(3 * (len(budgets) - 1)) // 4]}
    best: dict[tuple[str, int], Any] = {}
    for row in rows:
        place = (str(row.strategy), int(row.budget_bytes))
        if place[1] in picked and (place not in best or row.cost < best[place].cost):
            best[place] = row
    shown, steps = [], 0
    for strategy, budget in sorted(best, key=lambda place: (order_of(place[0]), place[1])):
        one = _shown(run, best[strategy, budget])
        if one is None:
            continue
        steps += len(one.plan.ids)
        if len(shown) >= MAX_PLANS or steps > MAX_STEPS:
            break
        shown.append(one)
    return shown


def _shown(run: Run, row: Any) -> ShownPlan | None:
    found = run.load_plan(row)
    return None if found is None else ShownPlan(row, *found)
