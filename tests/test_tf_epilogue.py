"""State changes that run as early as they may: the same bits, less memory, and nothing repeated sees a new variable."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import refused
from orders import random_order
from tf_helpers import (
    LOSS,
    QUICK,
    attention,
    batch_for,
    bits_of,
    built,
    captured_function,
    convolutional,
    drawing_twice,
    eager_iteration,
    keras,
    layers,
    needs_compiler,
    planned_step,
    specs_of,
    tf,
)

import remat.tf as rtf
from remat.plan import Scope
from remat.tf.emit import emit

pytestmark = pytest.mark.usefixtures("tf_cache", "kernels_not_measured")

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, clipnorm=1.0, use_ema=True),
    "global_clipnorm": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), dynamic_growth_steps=1),
}


@pytest.mark.parametrize(
    ("factory", "optimizer"),
    [(convolutional, "global_clipnorm"), (attention, "sgd"), (attention, "adamw"), (drawing_twice, "scaled")],
)
def test_random_plans_with_early_updates_give_the_bits_of_eager_mode(factory, optimizer):
    """Weights, slots, moving averages and seeds after two iterations in which a fifth of all values is repeated."""
    results = []
    for planned in (False, True):
        model, optimizer_ = built(factory), OPTIMIZERS[optimizer]()
        x, y = batch_for(model, 8)
        run = eager_iteration(model, optimizer_)
        if planned:
            step = rtf.compile(model, LOSS, optimizer_, *specs_of((x, y)), budget="1GB", **QUICK)._step
            order, n = random_order(step.planned, np.random.default_rng(1), 0.2), len(step.planned)
            merged = step.epilogue.merged(order)
            assert [k for k in merged if k < n] == order
            assert sorted(k for k in merged if k >= n) == list(range(n, len(step.graph)))
            run = planned_step(step, merged, whole=True)
        else:
            optimizer_.build(model.trainable_variables)
        variables = [*model.variables, *optimizer_.variables]
        found = [bits_of([], variables)]
        for _ in range(2):
            run(x, y)
            found.append(bits_of([], variables))
        assert found[0] != found[1]
        results.append(found)
    assert results[0] == results[1]


def test_a_plan_that_reads_a_variable_after_its_update_is_refused():
    """An embedding is gathered from the variable itself; a file may hold such an order."""
    table = tf.Variable(tf.ones((5, 3)))

    def step(places):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(table.sparse_read(places)))
        table.assign_sub(tf.convert_to_tensor(tape.gradient(loss, table)))
        return loss

    captured = captured_function(step, tf.TensorSpec((2,), "int32"))
    assert captured.graph.operations[0].kind == "ResourceGather"
    order = captured.epilogue.merged(range(len(captured.planned)))
    emit(captured, order)
    with refused(r"\(ResourceGather\) after its variable has changed"):
        emit(captured, [*order, 0])


@needs_compiler
def test_a_budget_below_all_gradients_is_met_where_each_is_applied_at_once():
    hidden = [layers.Dense(512, "tanh") for _ in range(8)]
    model = built(lambda: keras.Sequential([keras.Input((512,)), *hidden, layers.Dense(5, "softmax")]))
    specs = specs_of(batch_for(model, 8))
    step = rtf.compile(model, LOSS, "sgd", *specs, budget="12.5MB", **(QUICK | {"verify": True}))
    measured = step.measure()
    assert measured.peak_bytes <= step.budget_bytes
    assert measured.peak_bytes == pytest.approx(step.predicted_peak_bytes, rel=0.02)
    assert step.budget_bytes < 1.5 * sum(v.value.numpy().nbytes for v in model.trainable_variables)
    with refused(r"applying the gradients alone needs 1\d\.\d\d MB"):
        rtf.compile(model, LOSS, keras.optimizers.SGD(global_clipnorm=1.0), *specs, budget="12.5MB", **QUICK)


def test_fixed_order_keeps_the_epilogue_last():
    model = built(convolutional)
    specs = specs_of(batch_for(model, 8))
    for scope in ("fixed_order", "free"):
        step = rtf.compile(model, LOSS, "sgd", *specs, budget="1GB", **QUICK, scope=scope)
        n = len(step._step.planned)
        late = [at for at, k in enumerate(step.plan.order.tolist()) if k >= n]
        assert late
        assert (late == list(range(late[0], len(step.plan.order)))) == (scope == "fixed_order")
        assert Scope(scope).contains(step.plan.plan.scope)


def test_a_check_of_a_gradient_comes_before_every_update():
    """Then an exception leaves every variable as it was, although the checked gradient is the last to be computed."""
    rng = np.random.default_rng(0)
    matrices = [tf.Variable(rng.normal(size=(4, 4)), dtype="float32") for _ in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            for m in matrices:
                x = tf.tanh(x @ m)
            loss = tf.reduce_sum(x)
        first, *others = tape.gradient(loss, matrices)
        for m, g in zip(matrices, [tf.debugging.check_numerics(first, "bad gradient"), *others], strict=True):
            m.assign_sub(g)
        return loss

    before = [m.numpy() for m in matrices]
    planned = rtf.rematerialize(step, (tf.TensorSpec((2, 4)),), "1GB", **QUICK)
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad gradient"):
        planned(tf.fill((2, 4), np.inf))
    assert all((m.numpy() == old).all() for m, old in zip(matrices, before, strict=True))
