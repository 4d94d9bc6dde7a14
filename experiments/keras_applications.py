"""``python -m experiments.keras_applications``: every network of keras.applications, trained by `fit_within`.

Each has the smallest input that it accepts, random weights, and a budget below the peak of its plan without
recomputation. A row has the promised, predicted and measured peak (in fresh processes), and says whether losses,
weights, moving averages and seeds after some steps have the bits of the eager step. Prints a Markdown table;
``--out`` also writes the rows as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from experiments.arguments import run
from experiments.steps.command import TableCommand
from experiments.steps.job import Job
from experiments.steps.row import PLAIN, StepRow
from experiments.steps.table import BUDGET, MODEL, REMARK, table

SHARE = 0.85  # of the way from the fixed bytes to the peak without recomputation
COLUMNS = (
    MODEL, "always there MB", "plain MB", BUDGET, "predicted MB", "measured MB", "predicted overhead", "repeats",
    "bits of", REMARK,
)  # fmt: skip


def text(rows: Sequence[StepRow]) -> str:
    """The table, with the plain step as a column."""
    return table((row for row in rows if row.method != PLAIN), COLUMNS)


def names() -> Iterable[str]:
    """Networks of keras.applications."""
    from experiments.steps import keras_fit  # imports TensorFlow

    return keras_fit.names()


COMMAND = TableCommand(
    "keras_applications", "keras.applications trained within a budget", names, COLUMNS, text,
    Job("keras_fit", "", 8, cost="flops", time_limit_s=20.0, rounds=0, fractions=(SHARE,)),
)  # fmt: skip

if __name__ == "__main__":
    run(COMMAND.main)
