"""The README's table and figure from a finished sweep.

The table has the overhead of every strategy at three budgets: the smallest, the largest within the GPU's memory, and
checkpoint-all's peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from analysis.results import Frame, load_run
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from remat.errors import InvalidInput

FIGURE = "vgg19_sweep"


def table(rows: pd.DataFrame, gpu_bytes: int) -> str:
    """Overheads as Markdown, cheapest strategies first; proven optima are marked, equal strategies share a line.

    Args:
        rows: of a run's table.csv: strategy, budget_bytes, status, overhead.
    """
    budgets = sorted(rows["budget_bytes"].unique())
    within = [budget for budget in budgets if budget <= gpu_bytes] or budgets
    shown = sorted({budgets[0], within[-1], budgets[-1]})
    mean = {name: mine["overhead"].fillna(1e9).mean() for name, mine in rows.groupby("strategy")}  # no plan: last
    alike: dict[tuple[str, ...], list[str]] = {}
    for strategy in sorted(mean, key=lambda name: mean[name]):
        mine = rows[rows["strategy"] == strategy]
        ended = dict(zip(mine["budget_bytes"], zip(mine["status"], mine["overhead"], strict=True), strict=True))
        if any(ended[budget][0] != "SKIPPED" for budget in shown):
            alike.setdefault(tuple(_cell(*ended[budget]) for budget in shown), []).append(f"`{strategy}`")
    return markdown_table(
        ["overhead at a budget of", *(f"{b / 1e9:.2f} GB ({b / 2**30:.2f} GiB)" for b in shown)],
        [[", ".join(names), *cells] for cells, names in alike.items()],
    )


def _cell(status: str, overhead: float) -> str:
    if math.isnan(overhead):
        return status
    return f"{overhead:.2%}{' (optimal)' if status == 'OPTIMAL' else ''}"


@experiment(page="../README.md")
def readme(run: str = "") -> Iterator[Case]:
    """Page: the README's table and figure, of the finished sweep in the folder `run`."""
    yield Case(read, {"run": run})


def read(run: str) -> Iterator[Row]:
    """A row for each solve of a run.

    Raises:
        InvalidInput: it is not the folder of a finished run.
    """
    source = Path(run, "table.csv")
    if not source.is_file():
        raise InvalidInput(f"'{run}' has no table.csv; give the folder of a finished run: run=runs/NAME")
    memory_bytes = load_run(Path(run)).info["gpu"]["memory_bytes"]
    frame: Frame = pd.read_csv(source)
    for row in frame.itertuples():
        yield {"strategy": row.strategy, "budget_bytes": int(row.budget_bytes), "status": row.status,
               "overhead": None if math.isnan(row.overhead) else float(row.overhead),
               "gpu_bytes": int(memory_bytes)}  # fmt: skip


@readme.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The table and the figure of the last run."""
    latest = [row for row in rows if row["run"] == rows[-1]["run"]]
    figure = Path(latest[0]["run"], "figures", "overhead.png")
    text = table(pd.DataFrame(latest), latest[0]["gpu_bytes"])
    return Drawing(text, figures={FIGURE: figure} if figure.is_file() else {})
