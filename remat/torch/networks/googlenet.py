"""GoogLeNet (Szegedy et al., 2015) in PyTorch, with its two auxiliary heads.

Deviations from the paper, as in MONeT's network: batch norm after each convolution, and 3x3 where it has 5x5.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.torch.networks.resnet import conv_bn

AUXILIARY_WEIGHT = 0.3  # of each auxiliary loss: section 5 of the paper
HEADS_AFTER = (0, 3)  # blocks of the second group, which feed the auxiliary heads

# The paper's table 1, a group between poolings: channels of the 1x1 branch, both of the 3x3 branch, both of the third,
# of the pooling branch.
_GROUPS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64), (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)  # fmt: skip


def _unit(width_in: int, width: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(*conv_bn(width_in, width, kernel, stride), nn.ReLU(inplace=True))


class Inception(nn.Module):
    """Four branches side by side, their channels joined."""

    def __init__(self, width_in: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int):
        super().__init__()
        self.width = one + three + five + pool
        self.one = _unit(width_in, one)
        self.three = nn.Sequential(_unit(width_in, reduce3), _unit(reduce3, three, 3))
        self.five = nn.Sequential(_unit(width_in, reduce5), _unit(reduce5, five, 3))
        self.pool = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), _unit(width_in, pool))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.five(x), self.pool(x)], dim=1)


def _head(width_in: int, num_classes: int, dropout: float) -> nn.Sequential:
    """An auxiliary head: logits from the middle of the network."""
    return nn.Sequential(
        nn.AdaptiveAvgPool2d(4), _unit(width_in, 128), nn.Flatten(), nn.Linear(2048, 1024), nn.ReLU(inplace=True),
        nn.Dropout(dropout), nn.Linear(1024, num_classes),
    )  # fmt: skip


class GoogLeNet(nn.Module):
    """Logits [batch, classes]; with targets the loss, to which the auxiliary heads add theirs in training."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.4, auxiliary_dropout: float = 0.7):
        super().__init__()
        pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.stem = nn.Sequential(_unit(3, 64, 7, 2), pool, _unit(64, 64), _unit(64, 192, 3), pool)
        width, groups = 192, list[list[Inception]]()
        for group in _GROUPS:
            groups.append([])
            for sizes in group:
                groups[-1].append(Inception(width, *sizes))
                width = groups[-1][-1].width
        self.three, self.four, self.five = map(nn.ModuleList, groups)
        self.pool3, self.pool4 = pool, nn.MaxPool2d(2, 2, ceil_mode=True)
        self.heads = nn.ModuleDict({
            str(i): _head(groups[1][i].width, num_classes, auxiliary_dropout) for i in HEADS_AFTER
        })  # fmt: skip
        self.last = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(width, num_classes)
        )

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """`x` images [batch, 3, height, width]; targets [batch], integer."""
        x = self.stem(x)
        for block in self.three:
            x = block(x)
        x, guesses = self.pool3(x), []
        for i, block in enumerate(self.four):
            x = block(x)
            if self.training and targets is not None and str(i) in self.heads:
                guesses.append(self.heads[str(i)](x))
        x = self.pool4(x)
        for block in self.five:
            x = block(x)
        logits = self.last(x)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits, targets)
        return loss + AUXILIARY_WEIGHT * sum(F.cross_entropy(guess, targets) for guess in guesses)


def googlenet(
    batch_size: int = 320,
    input_size: tuple[int, ...] = (3, 224, 224),
    num_classes: int = 1000,
    dropout: float = 0.4,
    auxiliary_dropout: float = 0.7,
) -> tuple[GoogLeNet, tuple[Tensor, Tensor]]:
    """The network, with images and their classes."""
    targets = torch.zeros(batch_size, dtype=torch.long)
    return GoogLeNet(num_classes, dropout, auxiliary_dropout), (torch.zeros(batch_size, *input_size), targets)
