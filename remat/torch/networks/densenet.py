"""DenseNet (Huang et al., 2017) in PyTorch: every layer of a block reads all before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DenseLayer(nn.Module):
    """Pre-activated 1x1 then 3x3 convolution that makes `growth` new channels."""

    def __init__(self, channels: int, growth: int):
        super().__init__()
        self.norm_1, self.conv_1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.norm_2, self.conv_2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv_2(F.relu(self.norm_2(self.conv_1(F.relu(self.norm_1(x), inplace=True))), inplace=True))
        return torch.cat([x, new], dim=1)


def _transition(channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.Conv2d(channels, channels // 2, 1, bias=False),
        nn.AvgPool2d(2),
    )


def densenet121(
    input_size: tuple[int, ...] = (3, 224, 224),
    num_classes: int = 1000,
    growth: int = 32,
    blocks: tuple[int, ...] = (6, 12, 24, 16),
) -> nn.Sequential:
    """DenseNet-121 by default, for images of `input_size` channels."""
    channels = 2 * growth
    layers: list[nn.Module] = [
        nn.Conv2d(input_size[0], channels, 7, 2, 3, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    for i, n_layers in enumerate(blocks):
        for _ in range(n_layers):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        if i + 1 < len(blocks):
            layers.append(_transition(channels))
            channels //= 2
    layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(channels, num_classes))
