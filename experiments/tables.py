"""The table that a run prints: one row per strategy."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from experiments.row import Row
from remat.solve import Status
from remat.units import format_cost, format_size

_REASON_WIDTH = 60


def result_table(rows: Sequence[Row], cost_unit: str) -> Table:
    """One budget: what each strategy found; several: a summary of each strategy's rows."""
    budgets = sorted({row.budget_bytes for row in rows})
    return _of_one_budget(rows, cost_unit) if len(budgets) == 1 else _of_sweep(rows, budgets)


def _of_one_budget(rows: Sequence[Row], cost_unit: str) -> Table:
    table = Table(title=f"budget {format_size(rows[0].budget_bytes)}", title_justify="left")
    for name in ("strategy", "status"):
        table.add_column(name, no_wrap=True)
    for name in ("cost", "overhead", "gap", "peak", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in sorted(rows, key=lambda row: (row.cost is None, row.cost or 0)):
        found = row.cost is not None
        table.add_row(
            row.strategy,
            row.status,
            format_cost(row.cost, cost_unit) if row.cost is not None else "",
            _percent(row.overhead),
            _percent(row.gap),
            f"{row.peak_bytes / 1e9:.3f} GB" if row.peak_bytes is not None else "",
            f"{row.wall_s:.1f}",
            Text("" if found else row.message),
        )
    return table


def _of_sweep(rows: Sequence[Row], budgets: Sequence[int]) -> Table:
    shown = sorted({budgets[0], budgets[len(budgets) // 3], budgets[2 * len(budgets) // 3]})
    table = Table(
        title=f"{len(budgets)} budgets from {format_size(budgets[0])} to {format_size(budgets[-1])}",
        caption="overhead at three of the budgets; * proven optimal",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    table.add_column("strategy", no_wrap=True)
    for name in ("plans", "optimal", "smallest budget met"):
        table.add_column(name, justify="right")
    for budget in shown:
        table.add_column(f"{budget / 1e9:.3g} GB", justify="right", no_wrap=True)
    table.add_column("mean s", justify="right")
    table.add_column("why not", overflow="fold", max_width=_REASON_WIDTH)
    for name in dict.fromkeys(row.strategy for row in rows):
        own = {row.budget_bytes: row for row in rows if row.strategy == name}
        found = [row for row in own.values() if row.cost is not None]
        optimal = sum(row.status == Status.OPTIMAL for row in found)
        reason = "" if found else next(iter(own.values())).message
        table.add_row(
            name,
            f"{len(found)}/{len(own)}",
            str(optimal),
            f"{min(row.budget_bytes for row in found) / 1e9:.3f} GB" if found else "",
            *[_cell(own.get(budget)) for budget in shown],
            f"{sum(row.wall_s for row in own.values()) / len(own):.1f}",
            Text(reason),
        )
    return table


def _cell(row: Row | None) -> str:
    if row is None or row.overhead is None:
        return "" if row is None else row.status
    return _percent(row.overhead) + ("*" if row.status == Status.OPTIMAL else "")


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.2f} %"
