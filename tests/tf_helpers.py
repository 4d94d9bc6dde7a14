"""Keras networks, their batches and what a step of them leaves behind, for the tests of TensorFlow.

Importing this module skips the importing test module where Keras or TensorFlow is absent.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
keras = pytest.importorskip("keras", reason="keras is not installed: pip install 'remat[tensorflow]'")
tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed: pip install 'remat[tensorflow]'")

import remat  # noqa: E402
import remat.tf as rtf  # noqa: E402
from remat.execution import Peaks  # noqa: E402
from remat.tf import _heap, _plan  # noqa: E402
from remat.tf._step import PlannedStep  # noqa: E402
from remat.tf.api import Objective  # noqa: E402
from remat.tf.capture import capture_step, trace  # noqa: E402

layers = keras.layers
QUICK = {"cost": "flops", "time_limit_s": 2.5, "verify": False}
needs_compiler = pytest.mark.skipif(bool(_heap.can_measure()), reason=f"memory not measured: {_heap.can_measure()}")


def convolutional():
    """Convolutions, batch norm, dropout, a skip connection, pooling."""
    x = inputs = keras.Input((16, 16, 3))
    x = skip = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Dropout(0.3)(layers.DepthwiseConv2D(3, padding="same")(x))
    x = layers.ReLU()(layers.Add()([x, skip]))
    for _ in range(4):
        x = layers.Conv2D(8, 3, padding="same", activation="tanh")(x)
    x = layers.MaxPool2D()(x)
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.Flatten()(x)))


def attention():
    """Embedding (a sparse gradient), attention, dropout, layer norm."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.GlobalAveragePooling1D()(x)))


def two_in_two_out():
    """Shared weights, two inputs and two outputs, an activity regularizer."""
    a, b = keras.Input((6,)), keras.Input((6,))
    shared = layers.Dense(8, activation="tanh", activity_regularizer="l2")
    x = layers.Concatenate()([shared(a), shared(b)])
    left = layers.Dense(5, activation="softmax")(layers.Dropout(0.5)(x))
    return keras.Model([a, b], [left, layers.Dense(5, activation="softmax")(layers.BatchNormalization()(x))])


def recurrent():
    inputs = keras.Input((5, 3))
    x = layers.LSTM(6, return_sequences=True)(layers.Dense(4, activation="relu")(inputs))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.GRU(4)(x)))


def drawing_twice():
    """A dropout that is used twice draws twice from one seed."""
    inputs, drop = keras.Input((5, 3)), layers.Dropout(0.3)
    x = drop(layers.Dense(4, activation="tanh")(drop(inputs)))
    return keras.Model(inputs, layers.Dense(5, activation="softmax")(layers.LSTM(4, dropout=0.2)(x)))


NETWORKS = [convolutional, attention, two_in_two_out, recurrent, drawing_twice]
LOSS = "sparse_categorical_crossentropy"


def simulated_peak(step):
    """The plain peak of a step by the simulator, instead of a child process that measures it."""
    once = remat.Plan.from_order(step.graph, range(len(step.graph)))
    return Peaks(remat.simulate(step.graph, once).peak_bytes)


def batch_of(shapes, n_labels, integers=False):
    rng = np.random.default_rng(1)
    x = [
        tf.constant(rng.integers(0, 11, s), "int32") if integers else tf.constant(rng.normal(size=s), "float32")
        for s in shapes
    ]
    y = [tf.constant(rng.integers(0, 5, shapes[0][:1]), "int32") for _ in range(n_labels)]
    return (x[0] if len(x) == 1 else x), (y[0] if len(y) == 1 else y)


def batch_for(model, n=4):
    return batch_of([(n, *t.shape[1:]) for t in model.inputs], len(model.outputs), model.inputs[0].dtype == "int32")


def specs_of(batch):
    return tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), batch)


def built(factory):
    keras.utils.set_random_seed(0)
    return factory()


def state_of(variables):
    return [v.value.numpy() for v in variables]


def put_state(variables, state):
    for variable, value in zip(variables, state, strict=True):
        variable.value.assign(value)


def bits_of(results, variables):
    flat = [t for t in tf.nest.flatten(results, expand_composites=True) if t is not None]
    return [t.numpy().tobytes() for t in flat], [a.tobytes() for a in state_of(variables)]


def eagerly(function, *arguments):
    tf.config.run_functions_eagerly(True)
    try:
        return function(*arguments)
    finally:
        tf.config.run_functions_eagerly(False)


def compiled(planned, model, *how, budget="1GB", **options):
    """The model, compiled, within a budget or to run eagerly."""
    model.compile(*how, run_eagerly=not planned, **options)
    return rtf.fit_within(model, budget, **QUICK) if planned else model


def assert_as_eager(train):
    """``train(planned)`` returns a model that it trained and what it saw, which are those of eager mode to the bit."""
    results = []
    for planned in (True, False):
        keras.utils.set_random_seed(0)
        model, seen = train(planned)
        results.append((seen, bits_of([], [*model.variables, *model.optimizer.variables])))
    assert results[0] == results[1]


def eager_iteration(model, optimizer):
    """A step and its update in eager mode: (prediction, loss)."""
    objective = Objective(model, LOSS)

    def run(x, y):
        prediction, loss, gradients = eagerly(objective.differentiate, x, y, optimizer.scale_loss)
        eagerly(optimizer.apply, gradients, model.trainable_variables)
        return prediction, loss

    return run


def captured_function(step, *specs):
    return capture_step(trace(step, specs), "s", {})


def planned_step(step, order, whole=False):
    """A step that executes `order`, planned by nobody; updates come last unless it is the `whole` order."""
    full = order if whole else [*order, *range(len(step.planned), len(step.graph))]
    plan = remat.Plan.from_order(step.graph, full)
    remat.simulate(step.graph, plan)
    return PlannedStep(step, remat.execution.StepPlan(
        plan, step.graph, _plan.fingerprint(step, ""), "random", None, None, {}, "flops"))  # fmt: skip


class EagerStep:
    """A step of a network that was run eagerly, and the bits of its results and variables."""

    def __init__(self, factory):
        self.model = built(factory)
        self.batch = batch_for(self.model)
        objective = Objective(self.model, LOSS)
        function = trace(objective.step, specs_of(self.batch))
        self.step = capture_step(function, "m", {}, objective.values[0], objective.gradients)
        self.before = state_of(self.model.variables)
        self.expected = bits_of(eagerly(objective.step, *self.batch), self.model.variables)

    def check(self, order, calls=1):
        """A plan of this order gives the same bits, in each call."""
        run = planned_step(self.step, order)
        for _ in range(calls):
            put_state(self.model.variables, self.before)
            assert bits_of(run(*self.batch), self.model.variables) == self.expected
