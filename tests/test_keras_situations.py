"""Steps that people write with Keras: branches, loops, gradient accumulation by hand.

Each situation trains as the same model does with ``run_eagerly=True``; what cannot be planned is refused by name.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import ROOT, refused, run_python
from orders import random_order
from tf_helpers import (
    LOSS,
    QUICK,
    EagerStep,
    assert_as_eager,
    batch_of,
    built,
    captured_function,
    compiled,
    keras,
    layers,
    needs_compiler,
    state_of,
    tf,
)

import remat.tf as rtf

ops = keras.ops
pytestmark = pytest.mark.usefixtures("tf_cache", "kernels_not_measured")


class Situation(layers.Layer):
    """A layer of 6 features with two layers and a weight of its own, and the given body."""

    def __init__(self, body):
        super().__init__()
        self.body, self.dense, self.other = body, layers.Dense(6, activation="tanh"), layers.Dense(6)
        self.scale = self.add_weight(shape=(6,), initializer="ones", name="scale")

    def build(self, shape):
        self.dense.build(shape), self.other.build(shape)

    def call(self, x):
        return self.body(self, x)


def model_of(*bodies):
    x = inputs = keras.Input((6,))
    x = layers.Dense(6)(x)
    for body in bodies:
        x = Situation(body)(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(x))


def trained(factory, way, optimizer):
    """Bits of all variables after three steps; `way`: ``eager``, ``graph`` or ``plan``."""
    keras.utils.set_random_seed(0)
    model = factory()
    model.compile(optimizer(), LOSS, run_eagerly=way == "eager")
    if way == "plan":
        rtf.fit_within(model, "1GB", **QUICK)
    for _ in range(3):
        model.train_on_batch(*BATCH)
    return state_of([*model.variables, *model.optimizer.variables])


BATCH = batch_of([(4, 6)], 1)


def assert_trains_as_eager(factory, optimizer=lambda: keras.optimizers.Adam(0.05)):
    wanted, found = (trained(factory, way, optimizer) for way in ("eager", "plan"))
    assert [a.tobytes() for a in found] == [a.tobytes() for a in wanted]


BRANCHES = (
    lambda s, x: tf.cond(s.scale[0] > 0.5, lambda: x + s.dense(x), lambda: x),  # stochastic depth
    lambda s, x: tf.cond(
        tf.reduce_sum(x) > -99, lambda: tf.cond(s.scale[1] > 2, lambda: x, lambda: s.dense(x)), lambda: x
    ),
    lambda s, x: tf.switch_case(
        tf.constant(1) + tf.cast(s.scale[0] > 9, "int32"), [lambda: x, lambda: s.dense(x), lambda: x * s.scale]
    ),
)
LOOPS = (
    lambda s, x: ops.fori_loop(0, 3, lambda i, h: s.dense(h), x),
    lambda s, x: ops.while_loop(lambda i, h: i >= 2, lambda i, h: (i - 2, s.dense(h)), (7, x))[1],
    lambda s, x: 2.0 * ops.while_loop(  # it may end earlier
        lambda i, h: ops.logical_and(i < 9, ops.sum(h) > 1e9), lambda i, h: (i + 1, s.dense(h)), (0, x + s.scale)
    )[1],
    lambda s, x: tf.cond(s.scale[0] > 0.5, lambda: ops.fori_loop(0, 3, lambda i, h: s.dense(h), x), lambda: x),
    lambda s, x: ops.scan(lambda carry, row: (carry + row, carry * row), x[0] * 0, x)[1],
)  # fmt: skip
PYTHON = (lambda s, x: x + tf.ensure_shape(tf.numpy_function(lambda t: t * np.float32(0.5), [x], "float32"), x.shape),)


@pytest.mark.parametrize("bodies", [BRANCHES, LOOPS, PYTHON], ids=["branches", "loops", "numpy_function"])
def test_a_situation_trains_as_in_eager_mode(bodies):
    assert_trains_as_eager(lambda: model_of(*bodies))


def test_spectral_normalization():
    """Branches that read a kernel, which is then assigned, read and updated by the optimizer."""
    assert_trains_as_eager(lambda: keras.Sequential([
        keras.Input((6,)), layers.Dense(6), layers.SpectralNormalization(layers.Dense(6, activation="tanh")),
        layers.Dense(5, activation="softmax"),
    ]))  # fmt: skip


@pytest.mark.parametrize("bodies", [BRANCHES[:2], LOOPS[:2]], ids=["branches", "loops"])
def test_random_plans_of_branches_and_loops_give_the_bits_of_the_eager_step(bodies):
    run, repeated = EagerStep(lambda: model_of(*bodies)), set()
    opaque = {k for k, op in enumerate(run.step.planned.operations) if "If" in op.kind or "While" in op.kind}
    for seed in range(3):
        order = random_order(run.step.planned, np.random.default_rng(seed), 0.3)
        run.check(order)
        repeated |= {k for k in opaque if order.count(k) > 1}
    assert repeated


def test_memory_of_branches_by_hand():
    """`a` and `b` go to the gradient; their product waits for the result while the squares are added."""

    def body(x):
        a, b = tf.exp(x), tf.tanh(x)
        return a * b + tf.stop_gradient(tf.reduce_sum(tf.square(a) + tf.square(b)))

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(tf.cond(x[0, 0] > 0, lambda: body(x), lambda: x))
        return loss, tape.gradient(loss, x)

    graph = captured_function(step, tf.TensorSpec((8, 64))).graph
    forward = next(op for op in graph.operations if op.kind in ("If", "StatelessIf"))
    size = 8 * 64 * 4
    assert [graph.values[v].bytes for v in forward.outputs].count(size) == 3  # the result, a, b
    assert forward.workspace_bytes == 4 * size  # the product, both squares and their sum


@needs_compiler
@pytest.mark.slow
def test_a_plan_that_recomputes_branches_keeps_its_promise():
    """Convolutions in branches; a branch that ran beside what follows it would hold up to 8 MB more."""

    class Residual(layers.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.second = (layers.Conv2D(16, 3, padding="same") for _ in range(2))

        def build(self, shape):
            self.first.build(shape)
            self.second.build(shape)

        def call(self, x):
            return ops.cond(ops.sum(x) > -1e9, lambda: x + self.second(ops.sin(self.first(x))), lambda: x)

    def network():
        inputs = keras.Input((48, 48, 3))
        x = layers.Conv2D(16, 3, padding="same")(inputs)
        for _ in range(3):
            x = Residual()(x)
        return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling2D()(x)))

    specs = (tf.TensorSpec((16, 48, 48, 3)), tf.TensorSpec((16,), "int32"))
    step = rtf.rematerialize(built(network), specs, "22MB", loss=LOSS, **QUICK)
    kinds = [step._step.graph.operations[k].kind for k in step.plan.order.tolist()]
    assert kinds.count("If") > 3
    assert step.measure(runs=3).peak_bytes <= step.predicted_peak_bytes


# --- where a plan is the compiled step ---------------------------------------------------------------


def test_a_branch_not_taken_gives_gradients_of_zeros_as_in_the_compiled_step():
    """Eager mode gives None, and the optimizer leaves the variable out: another step where zeros move it."""

    def body(s, x):
        h = s.other(x)
        return ops.cond(ops.sum(x) > 1e9, lambda: s.dense(h), lambda: x)

    def factory():
        return model_of(body)

    assert_trains_as_eager(factory, lambda: keras.optimizers.SGD(0.1))  # zeros do not move it
    eager, graph, plan = (
        trained(factory, way, lambda: keras.optimizers.SGD(0.1, weight_decay=0.1)) for way in ("eager", "graph", "plan")
    )
    assert max(np.abs(a - b).max() for a, b in zip(plan, graph, strict=True)) < 1e-6
    assert max(np.abs(a - b).max() for a, b in zip(plan, eager, strict=True)) > 1e-3


def test_a_function_that_xla_compiles_is_named():
    model = compiled(True, model_of(lambda s, x: tf.function(soft, jit_compile=True)(x * s.scale)), "sgd", LOSS)
    with pytest.warns(UserWarning, match="jit_compile=True of soft is left out"):
        model.train_on_batch(*BATCH)


def soft(x):
    return tf.nn.softmax(x) * x


# --- optimizers in branches --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["variables", "gradients"])
def test_gradients_are_accumulated_by_hand(kind):
    """`optimizer.apply` in a branch of `tf.cond`: of variables, of outer gradients."""

    class Accumulating(keras.Model):
        def train_step(self, data):
            x, y = data[:2]
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            for total, gradient in zip(self.totals, gradients, strict=True):
                total.assign_add(gradient)
            self.count.assign_add(1)

            def apply():
                self.optimizer.apply(self.totals if kind == "variables" else gradients, self.trainable_variables)
                for total in self.totals:
                    total.assign(tf.zeros_like(total))
                self.count.assign(0)
                return True

            tf.cond(tf.equal(self.count, 2), apply, lambda: False)
            return {"loss": loss}

    def factory():
        base = model_of(lambda s, x: s.dense(x) * s.scale + s.other(x))
        model = Accumulating(base.inputs, base.outputs)
        model.totals = [tf.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]
        model.count = tf.Variable(0, trainable=False)
        return model

    assert_trains_as_eager(factory)


# --- losses with loops -------------------------------------------------------------------------------


def test_the_ctc_loss():
    """Its loops call functions by their names; they have no gradient of their own."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 8, 3)).astype("float32"), rng.integers(1, 5, (4, 3))

    def train(planned):
        model = keras.Sequential([keras.Input((8, 3)), layers.Dense(5)])
        compiled(planned, model, keras.optimizers.SGD(0.1), keras.losses.CTC())
        return model, [float(model.train_on_batch(x, y)) for _ in range(3)]

    assert_as_eager(train)


# --- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (lambda s, x: x + tf.reduce_sum(tf.boolean_mask(x, x > 0)), r"boolean_mask/Where:0' \(Where\).*the dataset$"),
        (
            lambda s, x: x + tf.cast(tf.size(tf.unique(tf.reshape(x, (-1,)))[0]), "float32"),
            r"\(Unique\) has no static shape .*its size depends on data; compute it before the step, .*the dataset$",
        ),
        (
            lambda s, x: x + tf.ensure_shape(tf.py_function(lambda t: t * 0.5, [x], "float32"), x.shape),
            r"gradient.*\(EagerPyFunc\).*give its shape with tf.ensure_shape, or compute it before the step",
        ),
        (
            lambda s, x: ops.while_loop(lambda h: ops.sum(h) < 9, lambda h: s.dense(h) + 1, x),
            "no number of turns that is known before the step; .*maximum_iterations=$",
        ),
        (
            lambda s, x: tf.cond(s.scale[0] > 2, lambda: s.scale.assign(s.scale * 2) * x, lambda: x),
            "which may change a variable in the forward pass",
        ),
    ],
    ids=["boolean_mask", "unique", "py_function", "while_loop", "a branch that writes"],
)
def test_a_refusal_names_the_operation_and_the_way_out(body, says):
    model = compiled(True, model_of(body), "sgd", LOSS)
    with refused(says):
        model.train_on_batch(*BATCH)


@needs_compiler
def test_python_calls_are_not_measured():
    """A fraction needs a process of its own, which knows nothing of the function."""
    model = compiled(True, model_of(*PYTHON), "sgd", LOSS, budget=0.9)
    with refused(r"the step calls Python .*give the budget as a size, and verify=False"):
        model.train_on_batch(*BATCH)


def test_every_function_refuses_another_backend(monkeypatch):
    model = model_of(lambda s, x: s.dense(x))
    model.compile("sgd", LOSS)
    specs = (tf.TensorSpec((4, 6)), tf.TensorSpec((4,), "int32"))
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    for call in (
        lambda: rtf.fit_within(model, "1GB"),
        lambda: rtf.compile(model, LOSS, "sgd", *specs, "1GB"),
        lambda: rtf.rematerialize(model, specs, "1GB", loss=LOSS),
    ):
        with refused("Keras runs on 'torch'; set KERAS_BACKEND=tensorflow"):
            call()


REPLICAS = """
    import keras, tensorflow as tf
    import remat.tf as rtf
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
    specs = tf.TensorSpec((4, 3)), tf.TensorSpec((4, 2))
    for call in (
        lambda: rtf.fit_within(model, "1GB").fit(tf.ones((4, 3)), tf.ones((4, 2)), verbose=0),
        lambda: rtf.compile(model, "mse", "sgd", *specs, "1GB"),
        lambda: rtf.rematerialize(model, specs, "1GB", loss="mse"),
    ):
        try:
            call()
        except ValueError as error:
            print("refused:", error)
"""


@pytest.mark.slow
def test_every_function_refuses_replicas_outside_of_their_scope():
    """In a process of its own, because devices are configured before the first use."""
    printed = run_python(REPLICAS, PYTHONPATH=str(ROOT), TF_CPP_MIN_LOG_LEVEL="3")
    assert printed.count("refused: a plan is for one device") == 3, printed
