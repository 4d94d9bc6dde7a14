"""U-Net (Ronneberger et al., 2015) in PyTorch, padded and with batch norm, as commonly trained.

Widths, sizes and operators follow from the activation and parameter bytes of MONeT's published U-Net profile: 416x608,
one output map, biases, a bottleneck as wide as the level above it because upsampling has no weights, and upsampling by
adaptive average pooling to a larger size, which for a factor of two is nearest-neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.errors import unknown_name

_UPSAMPLINGS = ("bilinear", "nearest", "adaptive_avg")


def _double_conv(width_in: int, width: int, middle: int | None = None) -> nn.Sequential:
    middle = middle or width
    return nn.Sequential(
        nn.Conv2d(width_in, middle, 3, padding=1),
        nn.BatchNorm2d(middle),
        nn.ReLU(inplace=True),
        nn.Conv2d(middle, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Four levels down, four up with concatenated skips; one map per class at the input's size."""

    def __init__(self, num_classes: int = 1, width: int = 64, upsampling: str = "adaptive_avg"):
        super().__init__()
        if upsampling not in _UPSAMPLINGS:
            raise unknown_name("upsampling", upsampling, _UPSAMPLINGS)
        self.upsampling = upsampling
        widths = [width * factor for factor in (1, 2, 4, 8, 8)]
        self.down = nn.ModuleList(_double_conv(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.pool = nn.MaxPool2d(2)
        ups = [(2 * widths[i], max(width, widths[i] // 2), widths[i]) for i in (3, 2, 1, 0)]
        self.up = nn.ModuleList(_double_conv(*sizes) for sizes in ups)
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for block in self.up:
            skip = skips.pop()
            x = block(torch.cat([skip, self._upsample(x, skip.shape[-2:])], dim=1))
        return self.head(x)

    def _upsample(self, x: Tensor, size: torch.Size) -> Tensor:
        if self.upsampling == "adaptive_avg":
            return F.adaptive_avg_pool2d(x, (size[0], size[1]))
        if self.upsampling == "nearest":
            return F.interpolate(x, size=size, mode="nearest")
        return F.interpolate(x, size=size, mode="bilinear", align_corners=True)


def unet(num_classes: int = 1, width: int = 64, upsampling: str = "adaptive_avg") -> UNet:
    return UNet(num_classes, width, upsampling)
