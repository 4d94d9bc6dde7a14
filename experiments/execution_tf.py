"""``python -m experiments.execution_tf``: memory, time and bits of plans that run in TensorFlow, measured.

Every model of `experiments.steps.keras_models` at several budgets: the peak of the step's plain `tf.function`; the
promised, predicted and measured peak (each in a fresh process); overheads; and which step has the same loss, gradients
and variables bit for bit: the eager one, or the plain `tf.function` with its graph optimizers off. Another row has
`tf.recompute_grad` over about sqrt(n) blocks of the same model. Prints a Markdown table; ``--out`` also writes the
rows as JSON.

Overheads are over the plain `tf.function`, and over the same function run as written (without grappler). Plans run as
written, and predicted overheads compare with that. `experiments.steps.keras_steps` says how times are taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from experiments.arguments import run
from experiments.steps.command import TableCommand
from experiments.steps.job import FRACTIONS, Job
from experiments.steps.table import STEPS, table


def models() -> Iterable[str]:
    """Names of the models."""
    from experiments.steps.keras_models import MODELS  # imports TensorFlow

    return MODELS


COMMAND = TableCommand(
    "execution_tf", "plans that run in TensorFlow, measured", models, STEPS, partial(table, columns=STEPS),
    Job("keras", "", fractions=FRACTIONS, peers=True),
)  # fmt: skip

if __name__ == "__main__":
    run(COMMAND.main)
