"""Networks of keras.applications, trained within a budget: the promise, the prediction and the bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tf_helpers import needs_compiler

from experiments.executed_steps import STEPS
from experiments.steps import keras_fit as applications
from experiments.steps.measure import measured

# Of most families; experiment=executed_steps runs all 40, the largest need 24 GB and many minutes.
SMALLEST = (
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "InceptionV3", "MobileNetV3Small", "ResNet50V2", "Xception",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("tf_cache")


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", SMALLEST)
def test_a_network_of_each_family_is_trained_within_its_budget(name):
    """At the smallest input that it accepts, at 0.9 of the peak that needs no recomputation; in fresh processes."""
    assert name in applications.names()
    plain, row = measured(**replace(STEPS["keras_applications"].usual, model=name, fractions=[0.9]).case.what)
    assert row["measured_peak_bytes"] is not None, row["note"]
    assert row["same_as"] == "eager"
    assert row["fixed_bytes"] < row["budget_bytes"] < row["plain_bytes"] == plain["measured_peak_bytes"]
    assert row["measured_peak_bytes"] <= row["budget_bytes"]
    assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.02)
