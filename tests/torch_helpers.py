"""A small network of PyTorch and its loss, for tests and for the processes that they start."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from remat.torch.resident.optimizer import TEMPORARIES
from remat.torch.resident.updates import with_updates
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.work import dense_bytes

IMAGES = (8, 3, 32, 32)


class Net(nn.Module):
    """Convolutions with batch norm, in-place ReLU and dropout."""

    def __init__(self, width: int = 24, n: int = 3, dropout: float = 0.1):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(n))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(n))
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = self.drop(F.relu(norm(conv(x)), inplace=True))
        return self.head(x.mean((2, 3)))


def squares(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def with_updates_by_name(step: CapturedStep, optimizer: str) -> CapturedStep:
    """The step with the updates of all its parameters by an optimizer that is only named, e.g. ``adamw``."""
    primals = enumerate(step.training_graph.primals)
    parameters = {i: x for i, x in primals if isinstance(x, nn.Parameter) and x.requires_grad}
    return with_updates(step, {i: TEMPORARIES[optimizer] * dense_bytes(x) for i, x in parameters.items()}, optimizer)
