"""table.csv with every row, and a short table for the terminal."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from analysis.results import WITH_PLAN, Frame, Run, load_run
from analysis.scales import budget_scale, byte_scale, show_bytes, show_cost, show_percent, show_seconds
from analysis.style import order_of
from remat.files import replacing
from remat.units import format_size

CSV_COLUMNS = (
    "graph_name", "strategy", "parameters", "scope", "accounting", "budget_bytes", "status", "cost", "cost_unit",
    "overhead", "bound", "gap", "peak_bytes", "wall_s", "time_limit_s", "seed", "threads", "plan_from", "plan_file",
    "message",
)  # fmt: skip
MOST_BUDGETS = 4  # columns, so that the table fits a terminal of 80 characters
_FORMULA = re.compile(r"\s*([=@＝＠]|[+\-＋－](?!$|[\d.,]+\s?%?$))")
COLOURS = {"OPTIMAL": "bold green", "FEASIBLE": "green", "FAILED": "bold red"}
SHORT = {"INFEASIBLE": "infeas.", "NO_PLAN": "no plan"}


def write_csv(run: Run, path: Path) -> Path:
    """Write every row of the run atomically, in full precision, with bytes and the graph's unit of cost."""
    return write_frame(run.rows[[column for column in CSV_COLUMNS if column in run.rows]], path)


def write_frame(frame: Frame, path: Path) -> Path:
    """Write a table as CSV, atomically; no cell of text begins as a formula."""
    with replacing(path) as scratch:
        frame.map(cell).to_csv(scratch, index=False)
    return path


def cell(content: Any) -> Any:
    """The content of a cell; a text that a spreadsheet would run gets an apostrophe, which shows it as text.

    Names come from files that anyone may have written. A number with a sign, as text, stays.
    """
    return f"'{content}" if isinstance(content, str) and _FORMULA.match(content) else content


def terminal_table(run_folder: Path) -> Table:
    """One line per strategy: overhead at up to `MOST_BUDGETS` budgets, or all about a single budget.

    Raises:
        InvalidInput: like `draw_run`.
    """
    run = load_run(run_folder)
    if not len(run.rows):
        table = _new_table(run.title)
        table.add_column("no results")
        return table
    budgets = sorted({int(b) for b in run.rows["budget_bytes"]})
    frame = run.rows.assign(_order=run.rows["strategy"].map(order_of))
    frame = frame.sort_values(["_order", "budget_bytes"], kind="stable")
    return _sweep(frame, run.title, budgets) if len(budgets) > 1 else _single(frame, run.title, budgets[0])


def _new_table(title: str, **more: Any) -> Table:
    """A table; the title is plain text, because rich would read brackets in a graph's name as markup."""
    heading = Text(title, style="table.title") if title else None
    return Table(title=heading, box=box.SIMPLE_HEAD, title_justify="left", **more)


def pick(budgets: Sequence[int], most: int = MOST_BUDGETS) -> list[int]:
    """Up to `most` budgets, evenly spread, with both ends."""
    if len(budgets) <= most:
        return list(budgets)
    return [budgets[round(i * (len(budgets) - 1) / (most - 1))] for i in range(most)]


def _single(frame: Frame, title: str, budget: int) -> Table:
    table = _new_table(f"{title}  budget {format_size(budget)}".strip())
    scale = byte_scale(float(budget))
    for name in ("Strategy", "Status"):
        table.add_column(name)
    for name in ("Overhead", "Cost", f"Peak ({scale.unit})", "Gap", "Wall"):
        table.add_column(name, justify="right")
    if not frame["status"].isin(WITH_PLAN).all():
        table.add_column("Why", overflow="fold")
    for row in frame.to_dict("records"):
        cells: list[str | Text] = [
            row["strategy"], Text(row["status"], style=COLOURS.get(row["status"], "yellow")),
            show_percent(row["overhead"]),
            Text(show_cost(row["cost"], row["cost_unit"])), show_bytes(row["peak_bytes"], scale),
            show_percent(row["gap"]), show_seconds(row["wall_s"]),
        ]  # fmt: skip
        if len(table.columns) > len(cells):
            cells.append("" if row["status"] in WITH_PLAN else Text(str(row["message"] or "")))
        table.add_row(*cells)
    return table


def _sweep(frame: Frame, title: str, budgets: Sequence[int]) -> Table:
    scale, columns = budget_scale(budgets), pick(budgets)
    caption = f"{title}\noverhead at each budget ({scale.unit}); * proven optimal".strip()
    table = _new_table(caption, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Strategy", no_wrap=True)
    for name in (*(show_bytes(budget, scale) for budget in columns), "Plans", "Proven", "Slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    for strategy, solves in frame.groupby("strategy", sort=False):
        by_budget = {int(row["budget_bytes"]): row for row in solves.to_dict("records")}
        planned, proven = solves["status"].isin(WITH_PLAN).sum(), (solves["status"] == "OPTIMAL").sum()
        table.add_row(
            strategy, *(_overhead_cell(by_budget.get(budget)) for budget in columns), f"{planned}/{len(solves)}",
            str(proven), show_seconds(solves["wall_s"].max()),
        )  # fmt: skip
    return table


def _overhead_cell(row: dict[str, Any] | None) -> Text:
    if row is None:
        return Text("–", style="dim")
    if row["status"] in WITH_PLAN:
        proven = row["status"] == "OPTIMAL"
        return Text(show_percent(row["overhead"]) + ("*" if proven else " "), style="bold" if proven else "")
    return Text(SHORT.get(row["status"]) or str(row["status"]).lower(), style="dim")
