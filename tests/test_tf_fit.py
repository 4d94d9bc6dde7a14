"""`fit_within` as a Keras user meets it: batches of several sizes, fractions, planning ahead."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused
from tf_helpers import LOSS, QUICK, built, keras, layers, simulated_peak, tf

import remat.tf as rtf
from remat.tf import _plan

pytestmark = pytest.mark.usefixtures("warm_search", "tf_cache", "kernels_not_measured")


@pytest.fixture
def plain_peaks(monkeypatch):
    """Plain peaks by the simulator instead of a child process; one entry for each that was asked for."""
    asked = []

    def simulated(step):
        asked.append(simulated_peak(step).plain_bytes)
        return simulated_peak(step)

    monkeypatch.setattr(_plan, "measured_plain_peak", simulated)
    return asked


def deep():
    """Activations that outweigh what is always there, also for 4 samples."""
    x = inputs = keras.Input((16, 16, 3))
    for _ in range(6):
        x = layers.Conv2D(16, 3, padding="same", activation="tanh")(x)
    x = layers.GlobalAveragePooling2D()(layers.Dropout(0.2)(layers.BatchNormalization()(x)))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))


def _model(**compiled):
    model = built(deep)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSS, metrics=["accuracy"], **compiled)
    return model


def _data(n=28):
    rng = np.random.default_rng(5)
    return rng.normal(size=(n, 16, 16, 3)), rng.integers(0, 5, n)


def _steps(model):
    """(step of 8, step of 4 samples)."""
    by_size = {int(key.partition("[")[2].partition(",")[0]): step for key, step in model.remat_steps.items()}
    return by_size[8], by_size[4]


# --- fractions -----------------------------------------------------------------------------------


@pytest.mark.short
def test_a_fraction_is_of_the_largest_batch(plain_peaks):
    """28 samples are 3 batches of 8 and one of 4, which runs as it is."""
    model = rtf.fit_within(_model(), 0.7, **QUICK)
    model.fit(*_data(), batch_size=8, verbose=0)
    (large, small), (peak,) = _steps(model), plain_peaks
    assert large.budget_bytes == small.budget_bytes == int(0.7 * peak)
    assert (bool(large.plan.recomputed), bool(small.plan.recomputed)) == (True, False)
    assert model.remat is large
    assert (large.plan.plain_peak_bytes, small.plan.plain_peak_bytes) == (peak, None)


@pytest.mark.slow
def test_a_larger_batch_and_another_optimizer_take_the_fraction_again(plain_peaks):
    """What was squeezed into the smaller promise is planned again, with the larger one."""
    model = rtf.fit_within(_model(), 0.7, **QUICK)
    x, y = _data()
    model.fit(x[:4], y[:4], batch_size=8, verbose=0)
    squeezed = model.remat
    assert squeezed.budget_bytes == int(0.7 * plain_peaks[0])
    assert squeezed.plan.recomputed
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    large, small = _steps(model)
    assert len(plain_peaks) == 2
    assert large.budget_bytes == small.budget_bytes == int(0.7 * plain_peaks[1]) > squeezed.budget_bytes
    assert model.remat is large
    assert not small.plan.recomputed
    model.fit(x, y, batch_size=8, verbose=0)
    assert _steps(model) == (large, small)
    model.compile("adam", LOSS)
    model.fit(x[:8], y[:8], batch_size=8, verbose=0)
    assert model.remat is not large
    assert model.remat.budget_bytes == int(0.7 * plain_peaks[2]) != large.budget_bytes


# --- planning ahead ------------------------------------------------------------------------------


def test_fit_does_not_pause_for_what_was_prepared(plain_peaks, caplog, tmp_path):
    """Arrays become tensors of Keras's float type, as in `fit`; the order of the batches does not matter.

    A saved plan serves the largest batch, and its budget the others.
    """
    model, (x, y) = rtf.fit_within(_model(), 0.7, **QUICK), _data()
    plans = rtf.prepare(model, (x[:4], y[:4]), (tf.TensorSpec((8, 16, 16, 3)), tf.TensorSpec((8,), "int64")))
    large, small = _steps(model)
    assert plans == (small.plan, large.plan)
    assert model.remat is large
    assert small.budget_bytes == large.budget_bytes
    large.plan.save(tmp_path / "plan.json")
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    assert not caplog.records
    assert _steps(model) == (large, small)
    loaded = rtf.fit_within(_model(), plan=tmp_path / "plan.json", **QUICK)
    assert loaded.fit(x, y, batch_size=8, epochs=2, verbose=0).history == history
    again, other = _steps(loaded)
    assert again.plan.order.tolist() == large.plan.order.tolist()
    assert other.budget_bytes == again.budget_bytes == large.budget_bytes
    assert len(plain_peaks) == 1
    expected = _model(run_eagerly=True)
    assert history == expected.fit(x, y, batch_size=8, epochs=2, verbose=0).history
    assert [w.tobytes() for w in model.get_weights()] == [w.tobytes() for w in expected.get_weights()]


def test_a_loop_that_pauses_says_so_once_for_each_shape(caplog):
    model = rtf.fit_within(_model(), "1GB", **QUICK)
    model.fit(*_data(), batch_size=8, epochs=2, verbose=0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "float32[8, 16, 16, 3], int64[8]" in said[0]
    assert "remat.tf.prepare(model" in said[0]


@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_prepared_is_what_fit_brings(weighted, caplog):
    """A model without variables yet, sample weights, a dataset, several steps per execution."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Dense(8, activation="tanh"), layers.Dense(1)])
    model.compile("adam", "mse", steps_per_execution=2, weighted_metrics=["mae"])
    rtf.fit_within(model, "1GB", **QUICK)
    x, y, w = (np.ones(shape, "float32") for shape in ((8, 3), (8, 1), (8,)))
    batch = (x, y, w) if weighted else (x, y)
    rtf.prepare(model, batch)
    model.fit(tf.data.Dataset.from_tensors(batch).repeat(5), verbose=0)
    model.fit(x, y, batch_size=8, sample_weight=w if weighted else None, verbose=0)
    model.train_on_batch(x, y, sample_weight=w if weighted else None)
    assert not caplog.records
    assert len(model.remat_steps) == (1 if weighted else 2)  # train_on_batch brings a third part, which is None
    assert len({step.plan.fingerprint for step in model.remat_steps.values()}) == 1


def test_prepare_refuses_what_it_cannot_plan():
    small = rtf.fit_within(_model(), "1kB", **QUICK)
    unknown = tf.TensorSpec((None, 16, 16, 3)), tf.TensorSpec((None,), "int64")
    for model, batch, says in (
        (_model(), _data(8), r"call remat\.tf\.fit_within\(model, budget\) first"),
        (rtf.fit_within(built(deep), "1GB", **QUICK), _data(8), "compile the model first"),
        (rtf.fit_within(_model(), "1GB", **QUICK), unknown, "has no static shape"),
        (small, _data(8), "no plan of"),
    ):
        with refused(says):
            rtf.prepare(model, batch)
    assert small.remat is None
