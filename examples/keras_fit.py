"""Train a Keras model in 60 % of the memory that it needs, with plain `model.fit`.

python examples/keras_fit.py
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import remat.tf as rtf


def main() -> None:
    parser = argparse.ArgumentParser(description="plain model.fit under a memory budget")
    parser.add_argument("--budget", default=0.6, help="a size like 2GB; else 0.6 of what the plain step needs")
    parser.add_argument("--quick", action="store_true", help="a small model, costs counted instead of measured")
    given = parser.parse_args()

    keras.utils.set_random_seed(0)
    size, batch_size = (32, 8) if given.quick else (64, 32)
    model = keras.Sequential([keras.Input((size, size, 3))])
    for _ in range(6):
        model.add(keras.layers.Conv2D(16, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(10, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

    # the only line that is not plain Keras
    rtf.fit_within(
        model, budget=given.budget, **({"cost": "flops", "time_limit_s": 4, "verify": False} if given.quick else {})
    )

    x, y = np.random.default_rng(0).normal(size=(4 * batch_size, size, size, 3)), np.arange(4 * batch_size) % 10
    model.fit(x.astype("float32"), y, batch_size=batch_size, epochs=2, verbose=2)
    print(model.remat.plan)


if __name__ == "__main__":
    main()
