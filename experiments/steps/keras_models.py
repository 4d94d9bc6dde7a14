"""Keras models for measurements of execution: built small, with a batch to run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

layers = keras.layers
CLASSES = 10
LOSS = "sparse_categorical_crossentropy"


@dataclass(frozen=True, slots=True)
class Sample:
    """A model with the specs of its inputs and labels, and a batch of them; its loss is `LOSS`."""

    model: keras.Model
    specs: tuple[Any, Any]
    batch: tuple[Any, Any]

    def state(self) -> list[np.ndarray]:
        """Copies of all variables, seeds included."""
        return [v.value.numpy() for v in self.model.variables]

    def restore(self, state: list[np.ndarray]) -> None:
        """Set all variables to copies that `state` returned."""
        for variable, value in zip(self.model.variables, state, strict=True):
            variable.value.assign(value)


def _application(name: str, side: int = 64) -> Callable[[], keras.Model]:
    return lambda: getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3), classes=CLASSES)


def unet() -> keras.Model:
    """A small U-Net: two levels of convolutions, batch norm, dropout and skips; one class per pixel."""
    x = inputs = keras.Input((128, 128, 3))
    skips = []
    for filters in (16, 32):
        x = _double(x, filters)
        skips.append(x)
        x = layers.MaxPool2D()(x)
    x = layers.Dropout(0.2)(_double(x, 64))
    for filters, skip in zip((32, 16), reversed(skips), strict=True):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = _double(layers.Concatenate()([x, skip]), filters)
    return keras.Model(inputs, layers.Conv2D(CLASSES, 1, activation="softmax")(x), name="unet")


def _double(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    return x


def transformer() -> keras.Model:
    """A classifier of tokens: an embedding, then three blocks of attention and a perceptron with dropout."""
    inputs = keras.Input((64,), dtype="int32")
    x = layers.Embedding(200, 64)(inputs)
    for _ in range(3):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x))
        hidden = layers.Dropout(0.1)(layers.Dense(256, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dense(64)(hidden))
    outputs = layers.Dense(CLASSES, activation="softmax")(layers.GlobalAveragePooling1D()(x))
    return keras.Model(inputs, outputs, name="transformer")


def lstm() -> keras.Model:
    """Two LSTM layers between dense ones."""
    inputs = keras.Input((48, 16))
    x = layers.Dense(64, activation="relu")(inputs)
    x = layers.LSTM(64, return_sequences=True)(x)
    x = layers.Dropout(0.2)(layers.LayerNormalization()(x))
    x = layers.LSTM(64)(x)
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x), name="lstm")


class Positions(layers.Layer):
    """Adds a learned vector to each position."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.table: Any = self.add_weight(
            shape=input_shape[1:], initializer=keras.initializers.RandomNormal(0.02, seed=0)
        )

    def call(self, x: Any) -> Any:
        return x + self.table


def _blocks(x: Any, width: int, heads: int, n: int, *, causal: bool) -> Any:
    """Pre-norm transformer blocks with dropout."""
    for _ in range(n):
        a = layers.LayerNormalization()(x)
        a = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(a, a, use_causal_mask=causal)
        x = layers.Add()([x, layers.Dropout(0.1)(a)])
        h = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dropout(0.1)(layers.Dense(width)(h))])
    return layers.LayerNormalization()(x)


def gpt2() -> keras.Model:
    """GPT-2 (Radford et al., 2019) at 6 layers of width 192, a context of 64 and a vocabulary of 1000."""
    tokens = keras.Input((64,), dtype="int32")
    x = layers.Dropout(0.1)(Positions()(layers.Embedding(1000, 192)(tokens)))
    x = _blocks(x, 192, 6, 6, causal=True)
    return keras.Model(tokens, layers.Dense(1000, activation="softmax")(x), name="gpt2")


def vit() -> keras.Model:
    """ViT (Dosovitskiy et al., 2021) at 6 layers of width 192 on images of 32 pixels in patches of 4, mean pooling."""
    images = keras.Input((32, 32, 3))
    x = layers.Reshape((64, 192))(layers.Conv2D(192, 4, strides=4)(images))
    x = _blocks(layers.Dropout(0.1)(Positions()(x)), 192, 6, 6, causal=False)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(images, layers.Dense(CLASSES, activation="softmax")(x), name="vit")


MODELS: dict[str, tuple[Callable[[], keras.Model], int]] = {  # and their batch sizes
    "vgg16": (_application("VGG16"), 48),
    "resnet50": (_application("ResNet50", 128), 16),
    "mobilenet_v2": (_application("MobileNetV2"), 16),
    "unet": (unet, 8),
    "densenet121": (_application("DenseNet121"), 16),
    "gpt2": (gpt2, 8),
    "vit": (vit, 16),
    "transformer": (transformer, 16),
    "lstm": (lstm, 32),
}


def build(name: str) -> Sample:
    """A model of `MODELS` with seeded weights and a seeded batch."""
    keras.utils.set_random_seed(0)
    factory, n = MODELS[name]
    model = factory()
    rng = np.random.default_rng(0)
    inputs = model.inputs[0]
    shape, labels = (n, *inputs.shape[1:]), (n, *model.outputs[0].shape[1:-1])
    if inputs.dtype == "int32":
        x = tf.constant(rng.integers(0, 200, shape), "int32")
    else:
        x = tf.constant(rng.normal(size=shape), "float32")
    y = tf.constant(rng.integers(0, CLASSES, labels), "int32")
    specs = (tf.TensorSpec(shape, inputs.dtype), tf.TensorSpec(labels, "int32"))
    return Sample(model, specs, (x, y))
