"""The five networks of MONeT (Shah et al., ICLR 2021) as lists of layers with shapes; no framework is imported.

Kinds are those of MONeT's traces. Work is counted as in the frontends: 2 FLOPs per multiply-add, each tensor read or
written once. `remat.frontends.monet` makes training graphs of the networks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

FLOAT_BYTES, INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class Layer:
    """One forward operation.

    Attributes:
        kind: as in the traces, e.g. ``aten::relu_``.
        inputs: the layers that it reads; 0 is the input batch.
        shape: of its output.
        flops: 2 per multiply-add.
        weight_bytes: of its weight matrix or filters, biases excluded.
        saved_bytes: pooling indices or dropout masks, which PyTorch writes beside the output.
        parameters: number of trained elements, biases included.
        buffers: number of elements of running statistics.
        kernel, stride, groups: of a convolution.
    """

    kind: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    flops: int = 0
    weight_bytes: int = 0
    saved_bytes: int = 0
    parameters: int = 0
    buffers: int = 0
    kernel: int = 0
    stride: int = 1
    groups: int = 1

    @property
    def bytes(self) -> int:
        """Size of its output."""
        return FLOAT_BYTES * math.prod(self.shape)

    @property
    def has_two_gradients(self) -> bool:
        """Whether the gradients of weights and input are separate operations; depthwise convolutions have one."""
        return self.kind == "aten::addmm" or (self.kind == "aten::_convolution" and self.groups == 1)


class Network:
    """A list of layers; each method returns the number of the layer that it adds."""

    def __init__(self, input_shape: tuple[int, ...]):
        self.layers = [Layer("input", (), input_shape)]

    def _add(self, kind: str, inputs: Iterable[int], shape: tuple[int, ...], **more: int) -> int:
        self.layers.append(Layer(f"aten::{kind}", tuple(inputs), shape, **more))
        return len(self.layers) - 1

    def shape(self, x: int) -> tuple[int, ...]:
        return self.layers[x].shape

    def conv(self, x: int, channels: int, kernel: int, stride: int = 1, *, groups: int = 1, bias: bool = False) -> int:
        """A convolution, padded so that stride 1 keeps the size."""
        n, c, h, w = self.shape(x)
        pad = kernel // 2
        shape = (n, channels, *((side + 2 * pad - kernel) // stride + 1 for side in (h, w)))
        weights = channels * c // groups * kernel * kernel
        return self._add(
            "_convolution", [x], shape, flops=2 * math.prod(shape) * c // groups * kernel * kernel,
            weight_bytes=weights * FLOAT_BYTES, parameters=weights + (channels if bias else 0),
            kernel=kernel, stride=stride, groups=groups,
        )  # fmt: skip

    def linear(self, x: int, features: int) -> int:
        n, c = self.shape(x)
        return self._add(
            "addmm", [x], (n, features), flops=2 * n * c * features, weight_bytes=c * features * FLOAT_BYTES,
            parameters=(c + 1) * features,
        )  # fmt: skip

    def norm(self, x: int) -> int:
        """Batch normalization."""
        shape = self.shape(x)
        return self._add(
            "batch_norm", [x], shape, flops=math.prod(shape), parameters=2 * shape[1], buffers=2 * shape[1]
        )

    def elementwise(self, kind: str, *inputs: int, mask_bytes: int = 0) -> int:
        shape = self.shape(inputs[0])
        return self._add(kind, inputs, shape, flops=math.prod(shape), saved_bytes=mask_bytes * math.prod(shape))

    def relu(self, x: int) -> int:
        return self.elementwise("relu_", x)

    def dropout(self, x: int) -> int:
        return self.elementwise("dropout", x, mask_bytes=1)

    def max_pool(self, x: int, kernel: int, stride: int, pad: int = 0, *, ceil: bool = False) -> int:
        n, c, h, w = self.shape(x)
        up = stride - 1 if ceil else 0
        shape = (n, c, *((side + 2 * pad - kernel + up) // stride + 1 for side in (h, w)))
        return self._add("max_pool2d", [x], shape, saved_bytes=INDEX_BYTES * math.prod(shape))

    def resize(self, x: int, height: int, width: int) -> int:
        """Adaptive average pooling, up or down."""
        return self._add("adaptive_avg_pool2d", [x], (*self.shape(x)[:2], height, width))

    def cat(self, *inputs: int) -> int:
        n, _, h, w = self.shape(inputs[0])
        return self._add("cat", inputs, (n, sum(self.shape(x)[1] for x in inputs), h, w))

    def flatten(self, x: int) -> int:
        n, *rest = self.shape(x)
        return self._add("flatten", [x], (n, math.prod(rest)))


def vgg16(batch: int) -> Network:
    """VGG16 at 224 x 224, as torchvision builds it."""
    net = Network((batch, 3, 224, 224))
    x = 0
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            x = net.relu(net.conv(x, channels, 3, bias=True))
        x = net.max_pool(x, 2, 2)
    x = net.flatten(net.resize(x, 7, 7))
    for _ in range(2):
        x = net.dropout(net.relu(net.linear(x, 4096)))
    net.linear(x, 1000)
    return net


def resnet50(batch: int) -> Network:
    """ResNet50 at 224 x 224 with the stride in the 3 x 3 convolution, as torchvision builds it."""
    net = Network((batch, 3, 224, 224))

    def conv_norm(x: int, channels: int, kernel: int, stride: int = 1) -> int:
        return net.norm(net.conv(x, channels, kernel, stride))

    x = net.max_pool(net.relu(conv_norm(0, 64, 7, 2)), 3, 2, 1)
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(depth):
            stride_here = stride if block == 0 else 1
            y = net.relu(conv_norm(x, width, 1))
            y = net.relu(conv_norm(y, width, 3, stride_here))
            y = conv_norm(y, 4 * width, 1)
            short_cut = conv_norm(x, 4 * width, 1, stride_here) if block == 0 else x
            x = net.relu(net.elementwise("add_", y, short_cut))
    net.linear(net.flatten(net.resize(x, 1, 1)), 1000)
    return net


def unet(batch: int) -> Network:
    """The U-Net of MONeT: 416 x 608, widths 64 to 512, one class, resizing by adaptive pooling."""
    net = Network((batch, 3, 416, 608))

    def double(x: int, first: int, second: int) -> int:
        for channels in (first, second):
            x = net.relu(net.norm(net.conv(x, channels, 3, bias=True)))
        return x

    x, skips = double(0, 64, 64), []
    for width in (128, 256, 512, 512):
        skips.append(x)
        x = double(net.max_pool(x, 2, 2), width, width)
    for first, second in ((512, 256), (256, 128), (128, 64), (64, 64)):
        skip = skips.pop()
        x = double(net.cat(skip, net.resize(x, *net.shape(skip)[2:])), first, second)
    net.conv(x, 1, 1, bias=True)
    return net


# Inception blocks: width of the 1x1 branch, both of the 3x3 branch, both of the third, of the pooling branch.
_BLOCKS_3 = ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64))
_BLOCKS_4 = (
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
)  # fmt: skip
_BLOCKS_5 = ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128))


def googlenet(batch: int) -> Network:
    """GoogLeNet at 224 x 224 as torchvision, and thus MONeT, trains it: both auxiliary heads also end in logits.

    With batch normalization, and 3 x 3 where the paper has 5 x 5 (torchvision's issue 906).
    """
    net = Network((batch, 3, 224, 224))

    def unit(x: int, channels: int, kernel: int, stride: int = 1) -> int:
        return net.relu(net.norm(net.conv(x, channels, kernel, stride)))

    def inception(x: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> int:
        branches = [unit(x, one, 1), unit(unit(x, reduce3, 1), three, 3), unit(unit(x, reduce5, 1), five, 3)]
        return net.cat(*branches, unit(net.max_pool(x, 3, 1, 1, ceil=True), pool, 1))

    def head(x: int) -> None:
        y = net.flatten(unit(net.resize(x, 4, 4), 128, 1))
        net.linear(net.dropout(net.relu(net.linear(y, 1024))), 1000)

    x = net.max_pool(unit(0, 64, 7, 2), 3, 2, ceil=True)
    x = net.max_pool(unit(unit(x, 64, 1), 192, 3), 3, 2, ceil=True)
    for block in _BLOCKS_3:
        x = inception(x, *block)
    x = net.max_pool(x, 3, 2, ceil=True)
    for i, block in enumerate(_BLOCKS_4):
        x = inception(x, *block)
        if i in (0, 3):
            head(x)
    x = net.max_pool(x, 2, 2, ceil=True)
    for block in _BLOCKS_5:
        x = inception(x, *block)
    net.linear(net.dropout(net.flatten(net.resize(x, 1, 1))), 1000)
    return net


# Table 2 of MobileNetV2: expansion, channels, repeats, stride of the first repeat
_GROUPS = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2(batch: int) -> Network:
    """MobileNetV2 at 224 x 224, as torchvision builds it; ReLU6 is a ``hardtanh_`` in traces."""
    net = Network((batch, 3, 224, 224))

    def unit(x: int, channels: int, kernel: int, stride: int = 1, groups: int = 1) -> int:
        return net.elementwise("hardtanh_", net.norm(net.conv(x, channels, kernel, stride, groups=groups)))

    x = unit(0, 32, 3, 2)
    for expansion, width, repeats, stride in _GROUPS:
        for i in range(repeats):
            width_in, stride_here = net.shape(x)[1], stride if i == 0 else 1
            hidden = width_in * expansion
            y = x if expansion == 1 else unit(x, hidden, 1)
            y = net.norm(net.conv(unit(y, hidden, 3, stride_here, hidden), width, 1))
            x = net.elementwise("add", x, y) if stride_here == 1 and width_in == width else y
    x = unit(x, 1280, 1)
    net.linear(net.dropout(net.flatten(net.resize(x, 1, 1))), 1000)
    return net


NETWORKS: dict[str, Callable[[int], Network]] = {
    "resnet50": resnet50, "googlenet": googlenet, "unet": unet, "mobilenet_v2": mobilenet_v2, "vgg16": vgg16,
}  # fmt: skip
BATCHES = {"resnet50": 184, "googlenet": 320, "unet": 11, "mobilenet_v2": 272, "vgg16": 176}  # as published
