"""``python -m experiments.execution_table``: memory, time and bits of plans that run in PyTorch, measured.

Every model at several budgets, at sizes for a CPU: the plain step's peak, the promised, predicted and measured peak,
predicted and measured overhead of a step, and whether loss, gradients, buffers and random state equal the plain
step's bit for bit. Prints a Markdown table; ``--out`` also writes the rows as JSON.
"""

from __future__ import annotations

from functools import partial

from experiments.arguments import run
from experiments.steps.command import TableCommand
from experiments.steps.job import FRACTIONS, Job
from experiments.steps.table import STEPS, table
from experiments.steps.torch_sizes import ON_A_CPU

COMMAND = TableCommand(
    "execution_table", "plans that run in PyTorch, measured", lambda: ON_A_CPU, STEPS,
    partial(table, columns=STEPS), Job("torch", "", fractions=FRACTIONS),
)  # fmt: skip

if __name__ == "__main__":
    run(COMMAND.main)
