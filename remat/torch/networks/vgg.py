"""VGG (Simonyan & Zisserman, 2015) in PyTorch, configurations D (16) and E (19), without batch norm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_CONVS_PER_BLOCK = {11: (1, 1, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}


class VGG(nn.Module):
    """Five blocks of 3x3 convolutions and a pooling, three fully connected layers; logits [batch, classes].

    Args:
        hidden: width of the first two fully connected layers.
        channels_last: keep feature maps with channels last. On a CPU, oneDNN's kernels then need no copies of them.
    """

    def __init__(
        self,
        depth: int = 16,
        num_classes: int = 1000,
        dropout: float = 0.5,
        hidden: int = 4096,
        channels_last: bool = False,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        width_in = 3
        for n_convs, width in zip(_CONVS_PER_BLOCK[depth], (64, 128, 256, 512, 512), strict=True):
            for _ in range(n_convs):
                layers += [nn.Conv2d(width_in, width, 3, padding=1), nn.ReLU(inplace=True)]
                width_in = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )
        if channels_last:
            self.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def vgg16(num_classes: int = 1000, dropout: float = 0.5, hidden: int = 4096, channels_last: bool = False) -> VGG:
    return VGG(16, num_classes, dropout, hidden, channels_last)


def vgg19(num_classes: int = 1000, dropout: float = 0.5, hidden: int = 4096, channels_last: bool = False) -> VGG:
    return VGG(19, num_classes, dropout, hidden, channels_last)
