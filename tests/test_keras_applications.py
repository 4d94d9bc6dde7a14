"""Networks of keras.applications, trained within a budget: the promise, the prediction and the bits."""

from __future__ import annotations

import pytest
from tf_helpers import QUICK, needs_compiler

import remat.tf as rtf
from experiments import keras_applications as applications

pytestmark = pytest.mark.usefixtures("tf_cache")


@pytest.mark.usefixtures("kernels_not_measured")
@pytest.mark.parametrize(
    "name",
    ["EfficientNetB0", *(pytest.param(name, marks=pytest.mark.slow) for name in ("MobileNetV2", "ConvNeXtTiny"))],
)
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
@pytest.mark.parametrize("name", applications.names())
def test_every_network_is_trained_within_its_budget(name):
    """At the smallest input that it accepts; measured in fresh processes."""
    row = applications.row_of(name)
    assert not row.refusal
    assert row.same_bits
    assert row.always_bytes < row.budget_bytes < row.plain_bytes
    assert row.measured_bytes <= row.budget_bytes
    assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.02)
