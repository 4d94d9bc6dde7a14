"""Networks of keras.applications, trained within a budget: the promise, the prediction and the bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tf_helpers import QUICK, needs_compiler

import remat.tf as rtf
from experiments.executed_steps import STEPS
from experiments.steps import keras_fit as applications
from experiments.steps.measure import measured

# One of each family; experiment=executed_steps runs all 40, the largest need 24 GB and many minutes.
SMALLEST = (
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionV3", "MobileNet", "MobileNetV2",
    "MobileNetV3Small", "ResNet50", "ResNet50V2", "Xception",
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("tf_cache")


@pytest.mark.slow
@pytest.mark.usefixtures("kernels_not_measured")
@pytest.mark.parametrize("name", ["EfficientNetB0", "MobileNetV2", "ConvNeXtTiny"])
def test_bits_of_networks_that_recompute(name):
    """Two images, kernels not measured; captured constants (EfficientNet), grouped convolutions (ConvNeXt)."""
    model, data = applications.built(name), applications.batch_of(name, 2)
    rtf.fit_within(model, "1TB", **QUICK)
    rtf.prepare(model, (data[0][:2], data[1][:2]))
    plan = model.remat.plan
    always = plan.graph.fixed_bytes
    rtf.fit_within(model, int(always + 0.85 * (plan.peak_bytes - always)), **QUICK)
    ours = applications.trained(model, data, 2)
    assert model.remat.plan.order.tolist() != plan.order.tolist()
    with applications.functions_run_eagerly():
        assert ours == applications.trained(applications.built(name, run_eagerly=True), data, 2)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", SMALLEST)
def test_a_network_of_each_family_is_trained_within_its_budget(name):
    """At the smallest input that it accepts; measured in fresh processes."""
    assert name in applications.names()
    plain, row = measured(**replace(STEPS["keras_applications"].usual, model=name).case.what)
    assert row["measured_peak_bytes"] is not None, row["note"]
    assert row["same_as"] == "eager"
    assert row["fixed_bytes"] < row["budget_bytes"] < row["plain_bytes"] == plain["measured_peak_bytes"]
    assert row["measured_peak_bytes"] <= row["budget_bytes"]
    assert row["measured_peak_bytes"] == pytest.approx(row["predicted_peak_bytes"], rel=0.02)
