"""Every code block of the pages about Keras runs, one after the other, as a reader would type them."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import blocks_of, run_blocks
from tf_helpers import simulated_peak

from remat.cost import apply_cost
from remat.tf import _plan
from remat.tf.portable import StepMeasurement

pytestmark = pytest.mark.usefixtures("tf_cache")

GUIDE = Path(__file__).parents[1] / "docs" / "how-to" / "keras.md"


@pytest.fixture
def _nothing_measured(kernels_not_measured, monkeypatch):
    """Each measurement takes a process, and they have tests of their own."""
    find_plan = _plan.find_plan
    monkeypatch.setattr(_plan, "measured_plain_peak", simulated_peak)
    monkeypatch.setattr(_plan, "measure_step", lambda *_, **__: StepMeasurement(0, 0, 0.0, 0.0))
    monkeypatch.setattr(_plan, "costs_and_noise", lambda graph, *_, **__: (apply_cost(graph, "flops", None), None))
    monkeypatch.setattr(_plan, "find_plan", lambda *a, **k: find_plan(*a[:2], a[2].within(2.0), **k))


@pytest.mark.usefixtures("_nothing_measured")
def test_the_guide_runs(here, capsys):
    assert len(blocks_of(GUIDE)) == 5
    names = run_blocks(GUIDE)
    assert "computed again" in capsys.readouterr().out
    assert len(names["model"].remat_steps) == 2  # batches of 32 and of 16
    assert all(step.plan.recomputed for step in (names["step"], names["gradients_of"]))


@pytest.mark.usefixtures("_nothing_measured")
def test_the_start_page_runs(here):
    page = GUIDE.parents[1] / "start" / "keras.md"
    assert len(blocks_of(page)) == 3
    names = run_blocks(page)
    assert names["model"].remat.plan.recomputed
    assert (here / "model.keras").is_file()
