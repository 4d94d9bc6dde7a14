"""The README's table and figure from a finished sweep.

The table has the overhead of every strategy at three budgets: the smallest, the largest within the GPU's memory, and
checkpoint-all's peak.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from analysis.results import load_run
from experiments.documents import ROOT, Document, Drawing, markdown_table
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


def draw(arguments: Sequence[str]) -> Drawing:
    """The table and the figure of the finished run in a folder, the only argument.

    Raises:
        InvalidInput: the argument is not the folder of a finished run.
    """
    if len(arguments) != 1:
        raise InvalidInput("name the folder of one finished run")
    folder = Path(arguments[0])
    source, figure = folder / "table.csv", folder / "figures" / "overhead.png"
    if not source.is_file() or not figure.is_file():
        raise InvalidInput(f"{folder}: has no table.csv and figures/overhead.png; give the folder of a finished run")
    rows = pd.read_csv(source)
    run = load_run(folder)
    commits = run.rows["git_commit"].dropna().unique() if "git_commit" in run.rows else []
    return Drawing(
        table(rows, run.info["gpu"]["memory_bytes"]), figures={FIGURE: figure}, columns=list(rows.columns),
        commit=str(commits[0]) if len(commits) == 1 else None,
    )  # fmt: skip


DOCUMENT = Document("readme", ROOT / "README.md", draw, "RUN", ("strategy", "budget_bytes", "status", "overhead"))
