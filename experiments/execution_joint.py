"""``python -m experiments.execution_joint``: plans that choose implementations against those that only recompute.

Every PyTorch model at several budgets, with ``implementations=`` default, exact and joint: predicted and measured peak,
predicted overhead and measured step time beside the plain step's in the same rounds, the largest error of a gradient,
and which implementations run. On the CPU, at sizes for it, and on a GPU if one is at hand. Each model is measured in a
process of its own; its rows are kept as they come, so that a stopped run goes on. Prints Markdown; ``--out`` also
writes the rows as JSON, from which `experiments.implementation_tables` draws the page.
"""

from __future__ import annotations

from experiments.implementation_tables import MEASURED, report
from experiments.steps.command import TableCommand
from experiments.steps.job import FRACTIONS, Job
from experiments.steps.torch_sizes import ON_A_CPU


def _devices() -> str:
    import torch

    return "cpu,cuda" if torch.cuda.is_available() else "cpu"


COMMAND = TableCommand(
    "execution_joint", "plans that choose implementations, measured",
    lambda: (name for name in ON_A_CPU if name != "lstm"),  # whose step is one kernel, without implementations
    MEASURED, report,
    Job("torch", "", time_limit_s=20.0, rounds=21, implementations=("default", "exact", "joint"), fractions=FRACTIONS,
        gradient_errors=True),
    devices=_devices,
)  # fmt: skip

if __name__ == "__main__":
    COMMAND.run()
