"""ResNet (He et al., 2016) in PyTorch, the stride in the 3x3 convolution of a bottleneck (version 1.5)."""

from __future__ import annotations

from torch import Tensor, nn

from remat.errors import InvalidInput

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def conv_bn(width_in: int, width: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size at stride 1, then batch norm."""
    conv = nn.Conv2d(width_in, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width)]


class Block(nn.Module):
    """Two 3x3 convolutions (basic) or 1x1, 3x3, 1x1 (bottleneck), plus the shortcut."""

    def __init__(self, width_in: int, width: int, stride: int, bottleneck: bool):
        super().__init__()
        width_out = 4 * width if bottleneck else width
        if bottleneck:
            convs = [(width_in, width, 1, 1), (width, width, 3, stride), (width, width_out, 1, 1)]
        else:
            convs = [(width_in, width, 3, stride), (width, width, 3, 1)]
        layers: list[nn.Module] = []
        for conv in convs:
            layers += [*conv_bn(*conv), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers[:-1])
        same = stride == 1 and width_in == width_out
        self.shortcut = None if same else nn.Sequential(*conv_bn(width_in, width_out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, four groups of blocks, average pooling, one linear layer; logits [batch, classes]."""

    def __init__(self, depth: int = 50, num_classes: int = 1000):
        super().__init__()
        if depth not in _BLOCKS:
            raise InvalidInput(f"there is no ResNet of depth {depth}; choose one of {', '.join(map(str, _BLOCKS))}")
        bottleneck = depth >= 50
        self.stem = nn.Sequential(*conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        width_in = 64
        for group, n_blocks in enumerate(_BLOCKS[depth]):
            width = 64 * 2**group
            for i in range(n_blocks):
                blocks.append(Block(width_in, width, 2 if i == 0 and group else 1, bottleneck))
                width_in = 4 * width if bottleneck else width
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(width_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


def resnet50(depth: int = 50, num_classes: int = 1000) -> ResNet:
    return ResNet(depth, num_classes)
