"""The networks of the published P100 profiles, rebuilt as lists of operations with shapes.

Kinds and the order of gradients are those of the profiles (monet-schedules), which hold no shapes; work is counted as
the frontends count it: 2 FLOPs per multiply-add, each tensor read or written once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from remat.graph import Work

FLOAT_BYTES, INDEX_BYTES = 4, 8


@dataclass(frozen=True, slots=True)
class Node:
    """One operation of a rebuilt network: kind and bytes as the profiles name them, and its work."""

    kind: str
    bytes: int
    work: Work
    is_backward: bool = False


@dataclass(frozen=True, slots=True)
class _Forward:
    kind: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    flops: int = 0
    weight_bytes: int = 0
    saved_bytes: int = 0  # what it writes beside its output: pooling indices, dropout masks


class Network:
    """Records forward operations with shapes; `nodes` adds the backward pass in reverse order."""

    def __init__(self, input_shape: tuple[int, ...]):
        self._ops = [_Forward("input", (), input_shape)]

    def _add(self, kind: str, inputs: Iterable[int], shape: tuple[int, ...], **work: int) -> int:
        self._ops.append(_Forward(kind, tuple(inputs), shape, **work))
        return len(self._ops) - 1

    def shape(self, x: int) -> tuple[int, ...]:
        return self._ops[x].shape

    def conv(self, x: int, channels: int, kernel: int, stride: int = 1, pad: int | None = None) -> int:
        n, c, h, w = self.shape(x)
        pad = kernel // 2 if pad is None else pad
        shape = (n, channels, *((side + 2 * pad - kernel) // stride + 1 for side in (h, w)))
        weights = channels * c * kernel * kernel
        flops = 2 * math.prod(shape) * c * kernel * kernel
        return self._add("_convolution", [x], shape, flops=flops, weight_bytes=weights * FLOAT_BYTES)

    def linear(self, x: int, features: int) -> int:
        n, c = self.shape(x)
        return self._add(
            "addmm", [x], (n, features), flops=2 * n * c * features, weight_bytes=c * features * FLOAT_BYTES
        )

    def elementwise(self, kind: str, *inputs: int, mask_bytes: int = 0) -> int:
        shape = self.shape(inputs[0])
        return self._add(kind, inputs, shape, flops=math.prod(shape), saved_bytes=mask_bytes * math.prod(shape))

    def max_pool(self, x: int, kernel: int, stride: int, pad: int = 0) -> int:
        n, c, h, w = self.shape(x)
        shape = (n, c, *((side + 2 * pad - kernel) // stride + 1 for side in (h, w)))
        return self._add("max_pool2d", [x], shape, saved_bytes=INDEX_BYTES * math.prod(shape))

    def resize(self, x: int, height: int, width: int) -> int:
        return self._add("adaptive_avg_pool2d", [x], (*self.shape(x)[:2], height, width))

    def cat(self, x: int, y: int) -> int:
        n, c, h, w = self.shape(x)
        return self._add("cat", [x, y], (n, c + self.shape(y)[1], h, w))

    def flatten(self, x: int) -> int:
        n, *rest = self.shape(x)
        return self._add("flatten", [x], (n, math.prod(rest)))

    def nodes(self) -> list[Node]:
        """Forward operations, the loss, then every gradient; each tensor an operation touches is moved once."""
        sizes = [FLOAT_BYTES * math.prod(op.shape) for op in self._ops]
        nodes = []
        for k, op in enumerate(self._ops[1:], start=1):
            moved = sum(sizes[i] for i in op.inputs) + sizes[k] + op.weight_bytes + op.saved_bytes
            nodes.append(Node(op.kind, sizes[k], Work(op.flops, moved, is_free=op.kind == "flatten")))
        nodes.append(Node("loss", sizes[-1], Work(0, 2 * sizes[-1])))
        for k in range(len(self._ops) - 1, 0, -1):
            nodes += _gradients(self._ops[k], sizes[k], [sizes[i] for i in self._ops[k].inputs], k == 1)
        return nodes


def _gradients(op: _Forward, out_bytes: int, in_bytes: Sequence[int], is_first: bool) -> list[Node]:
    of_inputs = sum(in_bytes)
    if op.weight_bytes:
        to_weights = Work(op.flops, of_inputs + out_bytes + op.weight_bytes)
        to_input = Work(op.flops, out_bytes + op.weight_bytes + of_inputs, is_free=is_first)
        return [
            Node(f"{op.kind}_param_grad", 0, to_weights, True),
            Node(f"{op.kind}_ip_grad", 0 if is_first else of_inputs, to_input, True),
        ]
    reads_saved = {"batch_norm": of_inputs, "relu_": out_bytes, "max_pool2d": of_inputs}.get(op.kind, 0)
    moved = out_bytes + reads_saved + op.saved_bytes + of_inputs
    return [Node(f"{op.kind}_ip_grad", of_inputs, Work(op.flops, moved, is_free=op.kind == "flatten"), True)]


def vgg16(batch: int) -> list[Node]:
    """VGG16 at 224 x 224, as torchvision builds it."""
    net = Network((batch, 3, 224, 224))
    x = 0
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            x = net.elementwise("relu_", net.conv(x, channels, 3))
        x = net.max_pool(x, 2, 2)
    x = net.flatten(net.resize(x, 7, 7))
    for _ in range(2):
        x = net.elementwise("dropout", net.elementwise("relu_", net.linear(x, 4096)), mask_bytes=1)
    net.linear(x, 1000)
    return net.nodes()


def resnet50(batch: int) -> list[Node]:
    """ResNet50 at 224 x 224 with the stride in the 3 x 3 convolution, as torchvision builds it."""
    net = Network((batch, 3, 224, 224))

    def conv_norm(x: int, channels: int, kernel: int, stride: int = 1) -> int:
        return net.elementwise("batch_norm", net.conv(x, channels, kernel, stride))

    x = net.max_pool(net.elementwise("relu_", conv_norm(0, 64, 7, 2)), 3, 2, 1)
    for width, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for block in range(depth):
            stride_here = stride if block == 0 else 1
            y = net.elementwise("relu_", conv_norm(x, width, 1))
            y = net.elementwise("relu_", conv_norm(y, width, 3, stride_here))
            y = conv_norm(y, 4 * width, 1)
            short_cut = conv_norm(x, 4 * width, 1, stride_here) if block == 0 else x
            x = net.elementwise("relu_", net.elementwise("add_", y, short_cut))
    net.linear(net.flatten(net.resize(x, 1, 1)), 1000)
    return net.nodes()


def unet(batch: int) -> list[Node]:
    """The U-Net of the profile: 416 x 608, widths 64 to 512, one class, resizing by adaptive pooling."""
    net = Network((batch, 3, 416, 608))

    def double(x: int, first: int, second: int) -> int:
        for channels in (first, second):
            x = net.elementwise("relu_", net.elementwise("batch_norm", net.conv(x, channels, 3)))
        return x

    x, skips = double(0, 64, 64), []
    for width in (128, 256, 512, 512):
        skips.append(x)
        x = double(net.max_pool(x, 2, 2), width, width)
    for first, second in ((512, 256), (256, 128), (128, 64), (64, 64)):
        skip = skips.pop()
        x = double(net.cat(skip, net.resize(x, *net.shape(skip)[2:])), first, second)
    net.conv(x, 1, 1)
    return net.nodes()


NETWORKS = {"vgg16_b176": vgg16(176), "resnet50_b184": resnet50(184), "unet_b11": unet(11)}
