"""Sizes of the PyTorch networks: plain data, read on machines that have PyTorch alone."""

from __future__ import annotations

from typing import Any

# Two CPU cores train these in seconds: the networks of these names, narrower and with smaller inputs, so that most of
# the peak is activations.
ON_A_CPU: dict[str, dict[str, Any]] = {
    "gpt2": {
        "batch_size": 8,
        "options": {"length": 256, "vocabulary": 4000, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "llama": {
        "batch_size": 4,
        "options": {
            "length": 256, "vocabulary": 4000, "width": 192, "hidden": 512, "n_layers": 6, "n_heads": 6,
            "dtype": "float32",
        },
    },
    "vit": {
        "batch_size": 16, "input_size": (3, 96, 96), "options": {"patch": 8, "width": 192, "n_layers": 6, "n_heads": 6},
    },
    "resnet50": {"batch_size": 16, "input_size": (3, 128, 128)},
    "unet": {"batch_size": 4, "input_size": (3, 128, 128), "options": {"width": 32}},
    "mobilenet_v2": {"batch_size": 16, "input_size": (3, 128, 128)},
    "googlenet": {"batch_size": 16, "input_size": (3, 128, 128)},
    "vgg16": {"batch_size": 24, "input_size": (3, 96, 96), "options": {"hidden": 512, "channels_last": True}},
    "densenet121": {"batch_size": 8, "input_size": (3, 96, 96)},
    "lstm": {"batch_size": 16, "options": {"length": 48, "vocabulary": 1000, "width": 128}},
}  # fmt: skip
