"""MobileNetV2 (Sandler et al., 2018) in PyTorch.

ReLU6 is not in place: its backward reads its input, so that PyTorch would store a copy of the input.
"""

from __future__ import annotations

from torch import Tensor, nn

from remat.torch.networks.resnet import conv_bn

# expansion, channels, repeats, stride of the first: the paper's table 2
_GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


class InvertedResidual(nn.Module):
    """Expand (1x1), filter per channel (3x3), project (1x1, linear); a shortcut where shapes allow."""

    def __init__(self, width_in: int, width: int, stride: int, expansion: int):
        super().__init__()
        hidden = width_in * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers += [*conv_bn(width_in, hidden), nn.ReLU6()]
        layers += [*conv_bn(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.body = nn.Sequential(*layers, *conv_bn(hidden, width))
        self.has_shortcut = stride == 1 and width_in == width

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.has_shortcut else self.body(x)


class MobileNetV2(nn.Module):
    """Logits [batch, classes]."""

    def __init__(self, num_classes: int = 1000, dropout: float = 0.2):
        super().__init__()
        layers: list[nn.Module] = [*conv_bn(3, 32, 3, 2), nn.ReLU6()]
        width_in = 32
        for expansion, width, repeats, stride in _GROUPS:
            for i in range(repeats):
                layers.append(InvertedResidual(width_in, width, stride if i == 0 else 1, expansion))
                width_in = width
        self.features = nn.Sequential(*layers, *conv_bn(width_in, 1280), nn.ReLU6())
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


def mobilenet_v2(num_classes: int = 1000, dropout: float = 0.2) -> MobileNetV2:
    return MobileNetV2(num_classes, dropout)
