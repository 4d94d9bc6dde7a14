"""The README's table and figure from a finished sweep: ``python -m experiments.readme_table RUN_FOLDER``.

Writes the overhead of every strategy at three budgets (the smallest, the largest that the GPU holds,
checkpoint-all's peak) between the README's marks and copies the run's overhead figure to docs/figures.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from experiments.documents import DOCS, markdown_table, write_between_marks
from remat.errors import InvalidInput, RematError
from remat.files import read_json

COMMAND = "python -m experiments.readme_table RUN_FOLDER"
README = DOCS.parent / "README.md"
FIGURE = DOCS / "figures" / "vgg19_sweep.png"


def table(rows: pd.DataFrame, gpu_bytes: int) -> str:
    """Overheads as Markdown, proven optima marked, cheapest strategies first; strategies that agree share a line.

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


def main(arguments: Sequence[str]) -> int:
    """Write table and figure; 1 with one line if the folder is not that of a finished run."""
    try:
        if len(arguments) != 1:
            raise InvalidInput(f"usage: {COMMAND}")
        folder = Path(arguments[0])
        source, figure = folder / "table.csv", folder / "figures" / "overhead.png"
        if not source.is_file() or not figure.is_file():
            raise InvalidInput(
                f"{folder}: has no table.csv and figures/overhead.png; give the folder of a finished run"
            )
        gpu = read_json(folder / "run.json")["gpu"]
        text = table(pd.read_csv(source), gpu["memory_bytes"])
        print(text)
        write_between_marks(README, COMMAND, text)
        FIGURE.parent.mkdir(exist_ok=True)
        shutil.copyfile(figure, FIGURE)
    except RematError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
