"""``python -m experiments.execution_tf``: plans that run in TensorFlow, measured: memory, time, and bits.

Every model of `experiments.steps.keras_models` at several budgets: what the plain `tf.function` of the step needs, what
was promised, predicted and measured (each in a fresh process), overheads, and whose loss, gradients and variables it
has bit for bit: those of the eager step, or of the plain `tf.function` with its graph optimizers off.
`tf.recompute_grad` over about sqrt(n) blocks of the same model is a row too. Prints a Markdown table; ``--out`` also
writes the rows as JSON.

Overheads are over the plain `tf.function`, and over that one run as written (without grappler), which is what plans
are and what predicted overheads are over; see `experiments.steps.keras_steps` for how times are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from experiments.steps.command import TableCommand
from experiments.steps.job import FRACTIONS, Job
from experiments.steps.table import BUDGET, METHOD, MODEL, table

COLUMNS = (
    MODEL, METHOD, BUDGET, "plain MB", "predicted MB", "measured MB", "measured / predicted", "predicted overhead",
    "wall over as written", "wall over plain", "CPU over as written", "CPU over plain", "repeats", "bits of",
)  # fmt: skip


def models() -> Iterable[str]:
    """Those there are."""
    from experiments.steps.keras_models import MODELS  # imports TensorFlow

    return MODELS


COMMAND = TableCommand(
    "execution_tf", "plans that run in TensorFlow, measured", models, COLUMNS, partial(table, columns=COLUMNS),
    Job("keras", "", fractions=FRACTIONS, peers=True),
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.run()
