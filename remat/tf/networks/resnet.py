"""ResNets of any depth in Keras: four stages with any number of bottleneck blocks.

He, Zhang, Ren, Sun: Deep Residual Learning for Image Recognition, CVPR 2016, Table 1: (3, 4, 6, 3) is ResNet50,
(3, 4, 23, 3) ResNet101, (3, 8, 36, 3) ResNet152; layers are 2 + 3 * blocks. The layers are those of
`keras.applications.ResNet50` (stride in a block's first convolution, biases before batch norm). NHWC.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from remat.errors import InvalidInput
from remat.tf._keras import import_keras

WIDTHS = (64, 128, 256, 512)
FRAMES_PER_BLOCK = 60  # of Python's stack: Keras walks from the output to the input by recursion


def resnet(
    input_shape: tuple[int, ...] = (224, 224, 3), blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000
) -> Any:
    """A bottleneck ResNet with `blocks` blocks in each stage.

    Raises:
        InvalidInput: not four stages of at least one block.
    """
    if len(blocks) != len(WIDTHS) or min(blocks) < 1:
        raise InvalidInput(f"blocks must be four numbers of at least 1, not {list(blocks)}")
    keras = import_keras()
    layers = keras.layers
    image = keras.Input(input_shape)
    x = layers.ZeroPadding2D(3)(image)
    x = _normalised(layers, layers.Conv2D(64, 7, strides=2)(x))
    x = layers.ZeroPadding2D(1)(x)
    x = layers.MaxPooling2D(3, strides=2)(x)
    for stage, (width, count) in enumerate(zip(WIDTHS, blocks, strict=True)):
        for block in range(count):
            stride = 2 if stage and not block else 1
            x = _bottleneck(layers, x, width, stride, project=not block)
    x = layers.GlobalAveragePooling2D()(x)
    x = layers.Dense(classes, activation="softmax")(x)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + FRAMES_PER_BLOCK * sum(blocks)))
    return keras.Model(image, x, name="resnet")


def _bottleneck(layers: Any, x: Any, width: int, stride: int, *, project: bool) -> Any:
    """1x1, 3x3, 1x1 to four times the width, and a shortcut."""
    shortcut = x
    if project:
        shortcut = layers.BatchNormalization()(layers.Conv2D(4 * width, 1, strides=stride)(x))
    x = _normalised(layers, layers.Conv2D(width, 1, strides=stride)(x))
    x = _normalised(layers, layers.Conv2D(width, 3, padding="same")(x))
    x = layers.BatchNormalization()(layers.Conv2D(4 * width, 1)(x))
    return layers.Activation("relu")(layers.Add()([shortcut, x]))


def _normalised(layers: Any, x: Any) -> Any:
    return layers.Activation("relu")(layers.BatchNormalization()(x))
