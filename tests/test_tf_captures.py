"""Tensors that a training step captures from outside: constants, tables, variables of unknown shape."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused
from orders import random_order
from tf_helpers import (
    captured_function,
    eagerly,
    needs_compiler,
    planned_step,
    tf,
)

import remat.tf as rtf
from remat.errors import RematError
from remat.tf.capture import capture_step, trace
from remat.tf.emit import emit, emit_plain
from remat.tf.portable import load_step, measure_step, save_step

pytestmark = pytest.mark.usefixtures("tf_cache", "kernels_not_measured")

N = 300  # TensorFlow captures up to 128 elements as a constant of the trace, larger tensors as a placeholder


def _step_of(size: int):
    """A step that captures tensors of `size` elements of every kind, some of them twice, one in a loop."""
    rng = np.random.default_rng(0)
    real = tf.constant(rng.normal(size=size), "float32")
    half = tf.cast(tf.constant(rng.normal(size=size)), "bfloat16")
    places = tf.constant(rng.permutation(size))
    flags = tf.constant(np.arange(size) % 2 == 0)
    words = tf.constant(["w" * (i % 7) for i in range(size)])
    pair = tf.complex(real, real)
    array = rng.normal(size=size).astype("float32")

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.tanh(x * real) * array + tf.cast(half, "float32") * real
            y = tf.where(flags, y, tf.gather(y, places))
            y = y + tf.cast(tf.strings.length(words), "float32") * tf.math.real(pair)
            _, y = tf.while_loop(
                lambda i, _: i < 3, lambda i, z: (i + 1, tf.sin(z * real)), (0, y), maximum_iterations=3
            )
            loss = tf.reduce_sum(tf.square(y))
        return loss, tape.gradient(loss, x)

    return step, tf.constant(rng.normal(size=size), "float32")


@pytest.mark.parametrize("size", [3, N])
def test_captured_tensors_of_every_kind(size, tmp_path):
    """The bits of eager mode under a plan that repeats operations, here and from the files that a child reads."""
    step, x = _step_of(size)
    function = trace(step, (tf.TensorSpec((size,)),))
    kinds = {inner.op.type for _, inner in function.graph.captures}
    assert kinds == ({"Const"} if size < N else {"Placeholder"})
    captured = capture_step(function, "s", {})
    expected = [t.numpy().tobytes() for t in eagerly(step, x)]
    order = random_order(captured.planned, np.random.default_rng(0), 0.3)
    assert len(order) > len(captured.planned)
    assert [t.numpy().tobytes() for t in planned_step(captured, order)(x)] == expected
    for emitted in (emit(captured, order), emit_plain(function)):
        save_step(emitted, tmp_path)
        call, _ = load_step(tmp_path)
        np.testing.assert_allclose(call(x)[1].numpy(), np.frombuffer(expected[1], "float32"), rtol=1e-5, atol=1e-6)


def test_captured_tensors_are_always_there():
    """The batch, and each captured tensor once; a small one is a constant of the trace, which nobody counts."""
    large, small = tf.ones((N,)), tf.ones((3,))

    def step(x):
        return tf.reduce_sum(tf.tanh(x * large) + large) + tf.reduce_sum(small), []

    captured = captured_function(step, tf.TensorSpec((N,)))
    assert captured.graph.fixed_bytes == captured.fixed["batch and constants"] == 4 * N + 4 * N


def test_what_a_child_cannot_be_given_is_refused_with_a_way_out(tmp_path):
    """A table that only a result reads does not stand in the way of the plan, but of measuring it."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(tf.constant([1, 2]), tf.constant([3.0, 4.0])), -1.0
    )

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.tanh(x))
        return loss, tape.gradient(loss, x), table.lookup(tf.constant([1]))

    captured = capture_step(trace(step, (tf.TensorSpec((4,)),)), "s", {}, gradients=[])
    with refused(r"reads a state that is no variable.*verify=False"):
        save_step(emit(captured, range(len(captured.graph))), tmp_path)


@needs_compiler
@pytest.mark.slow
def test_a_child_measures_a_step_with_captured_tensors_or_says_why_not(tmp_path):
    """In fractions, in verification, and with the plan of a file; its exception is one line."""
    step, _ = _step_of(N)
    planned = rtf.rematerialize(step, (tf.TensorSpec((N,)),), 1.0, cost="flops", time_limit_s=2)
    assert planned.plan.plain_peak_bytes is not None
    planned.plan.save(tmp_path / "plan.json")
    loaded = rtf.rematerialize(step, (tf.TensorSpec((N,)),), plan=tmp_path / "plan.json")
    assert loaded.measure(2).peak_bytes <= loaded.budget_bytes

    def outside(x):
        return tf.reduce_sum(tf.gather(tf.range(3.0), tf.cast(x, "int32") + 7)), []

    with refused("measuring the step failed: code 1: InvalidArgumentError: .*indices", RematError):
        measure_step(emit_plain(trace(outside, (tf.TensorSpec((4,)),))), as_written=False)
