"""``python -m experiments.execution_joint``: plans that choose implementations against those that only recompute.

Every PyTorch model at several budgets, with ``implementations=`` default, exact and joint: predicted and measured peak,
predicted overhead and measured step time beside the plain step's in the same rounds, the largest error of a gradient,
and which implementations run. Models run on the CPU, at small sizes, and on a GPU if there is one. Each model is
measured in its own process; its rows are stored as they come, so that a stopped run continues. Prints Markdown;
``--out`` also writes the rows as JSON, from which `experiments.implementation_tables` draws the page.
"""

from __future__ import annotations

from experiments.arguments import run
from experiments.implementation_tables import MEASURED, report
from experiments.steps.command import TableCommand
from experiments.steps.job import FRACTIONS, Job
from experiments.steps.torch_sizes import ON_A_CPU


def _devices() -> tuple[str, ...]:
    import torch

    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


COMMAND = TableCommand(
    "execution_joint", "plans that choose implementations, measured",
    lambda: (name for name in ON_A_CPU if name != "lstm"),  # its step is one kernel without implementations
    MEASURED, report,
    Job("torch", "", time_limit_s=20.0, rounds=21, implementations=("default", "exact", "joint"), fractions=FRACTIONS,
        gradient_errors=True),
    devices=_devices,
)  # fmt: skip

if __name__ == "__main__":
    run(COMMAND.main)
