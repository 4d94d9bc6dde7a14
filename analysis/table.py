"""table.csv with every row, and a short table for the terminal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from analysis.results import WITH_PLAN, Frame, Run, load_run, name_scopes
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
    """The table of a run; raises `InvalidInput` like `draw_run`."""
    run = load_run(run_folder)
    return format_table(run.rows.to_dict("records"), title=run.title)


def format_table(rows: Sequence[dict[str, Any]], title: str = "") -> Table:
    """One line per graph and strategy: overhead at up to `MOST_BUDGETS` budgets, or all about a single budget.

    Args:
        rows: rows of the store, as dicts.
    """
    frame: Frame = pd.DataFrame(list(rows))
    frame = name_scopes(frame) if "scope" in frame else frame
    if not len(frame):
        table = Table(title=_plain(title), box=box.SIMPLE_HEAD, title_justify="left")
        table.add_column("no results")
        return table
    graphs = frame["graph_sha256"].unique()
    budgets = sorted({int(b) for b in frame["budget_bytes"]})
    per_graph = frame.groupby("graph_sha256")["budget_bytes"].nunique().max()
    if per_graph == 1:
        return _single(frame, title, several=len(graphs) > 1 or len(budgets) > 1)
    return _sweep(frame, title, budgets)


def pick(budgets: Sequence[int], most: int = MOST_BUDGETS) -> list[int]:
    """Up to `most` budgets, evenly spread, with both ends."""
    if len(budgets) <= most:
        return list(budgets)
    return [budgets[round(i * (len(budgets) - 1) / (most - 1))] for i in range(most)]


def _sorted(frame: Frame) -> Frame:
    order = frame["strategy"].map(order_of)
    return frame.assign(_order=order).sort_values(["graph_sha256", "_order", "budget_bytes"], kind="stable")


def _single(frame: Frame, title: str, *, several: bool) -> Table:
    budget = int(frame["budget_bytes"].iloc[0])
    caption = title if several else f"{title}  budget {format_size(budget)}".strip()
    table = Table(title=_plain(caption), box=box.SIMPLE_HEAD, title_justify="left")
    scale = byte_scale(float(frame["budget_bytes"].max()))
    if several:
        table.add_column("Graph")
        table.add_column(f"Budget ({scale.unit})", justify="right")
    table.add_column("Strategy")
    table.add_column("Status")
    for name in ("Overhead", "Cost", f"Peak ({scale.unit})", "Gap", "Wall"):
        table.add_column(name, justify="right")
    if not frame["status"].isin(WITH_PLAN).all():
        table.add_column("Why", overflow="fold")
    for row in _sorted(frame).to_dict("records"):
        cells: list[str | Text] = []
        if several:
            cells += [Text(str(row.get("graph_name", ""))), show_bytes(row["budget_bytes"], scale)]
        cells += [
            row["strategy"], _coloured(row["status"]), show_percent(row["overhead"]),
            Text(show_cost(row["cost"], row["cost_unit"])), show_bytes(row["peak_bytes"], scale),
            show_percent(row["gap"]), show_seconds(row["wall_s"]),
        ]  # fmt: skip
        if len(table.columns) > len(cells):
            cells.append("" if row["status"] in WITH_PLAN else Text(str(row["message"] or "")))
        table.add_row(*cells)
    return table


def _sweep(frame: Frame, title: str, budgets: Sequence[int]) -> Table:
    several = frame["graph_sha256"].nunique() > 1
    scale = budget_scale(budgets)
    heading = "overhead at each budget" + ("" if several else f" ({scale.unit})")
    caption = f"{title}\n{heading}; * proven optimal".strip()
    table = Table(
        title=_plain(caption), box=box.SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0), pad_edge=False
    )
    if several:
        table.add_column("Graph", no_wrap=True)
    table.add_column("Strategy", no_wrap=True)
    # Graphs of different sizes have no common budgets: a column is then a place from tightest to widest.
    groups = [part for _, part in frame.groupby("graph_sha256", sort=False)]
    picked = [pick(sorted({int(b) for b in part["budget_bytes"]})) for part in groups]
    width = max(map(len, picked))
    for i in range(width):
        head = show_bytes(picked[0][i], scale) if not several else f"budget {i + 1}"
        table.add_column(head, justify="right", no_wrap=True)
    for name in ("Plans", "Proven", "Slowest"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, columns in zip(groups, picked, strict=True):
        for strategy in sorted(part["strategy"].unique(), key=order_of):
            solves = part[part["strategy"] == strategy]
            cells: list[str | Text] = [Text(str(solves["graph_name"].iloc[0]))] if several else []
            cells.append(strategy)
            by_budget = {int(row["budget_bytes"]): row for row in solves.to_dict("records")}
            cells += [_overhead_cell(by_budget.get(budget)) for budget in columns]
            cells += [""] * (width - len(columns))
            planned, proven = solves["status"].isin(WITH_PLAN).sum(), (solves["status"] == "OPTIMAL").sum()
            cells += [f"{planned}/{len(solves)}", str(proven), show_seconds(solves["wall_s"].max())]
            table.add_row(*cells)
    return table


def _overhead_cell(row: dict[str, Any] | None) -> Text:
    if row is None:
        return Text("–", style="dim")
    if row["status"] in WITH_PLAN:
        proven = row["status"] == "OPTIMAL"
        return Text(show_percent(row["overhead"]) + ("*" if proven else " "), style="bold" if proven else "")
    return Text(SHORT.get(row["status"]) or str(row["status"]).lower(), style="dim")


def _plain(title: str) -> Text | None:
    """The title as plain text, because rich would read brackets in a graph's name as markup."""
    return Text(title, style="table.title") if title else None


def _coloured(status: str) -> Text:
    style = {"OPTIMAL": "bold green", "FEASIBLE": "green", "FAILED": "bold red"}.get(status, "yellow")
    return Text(status, style=style)
