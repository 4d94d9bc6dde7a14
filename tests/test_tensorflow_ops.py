"""The TensorFlow operation frontend: replayed on real tensors, counted by hand and by TensorFlow's own profiler."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from helpers import refused
from tf_helpers import keras, layers, put_state, state_of, tf

import remat
from remat.tf import _nodes as nodes
from remat.tf.operation_graph import TracedStep, operation_graph, trace_step

# --- networks ------------------------------------------------------------------------------------


def convolutional():
    """Convolutions of every kind, batch norm, dropout, a skip connection, pooling."""
    x = inputs = keras.Input((12, 12, 3))
    x = layers.Conv2D(4, 3, strides=2, padding="same", use_bias=False)(x)
    x = skip = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.DepthwiseConv2D(3, padding="same")(x)
    x = layers.Dropout(0.4)(layers.BatchNormalization()(x))
    x = layers.MaxPool2D()(layers.Add()([x, skip]))
    x = layers.Conv2DTranspose(5, 2, strides=2, activation="relu")(x)
    x = layers.Concatenate()([layers.AveragePooling2D(2)(x), layers.AveragePooling2D(2)(skip)])
    x = layers.Dense(7, activation="softmax")(layers.Flatten()(x))
    return keras.Model(inputs, x)


def attention():
    """Embedding (a sparse gradient), attention, dropout, layer norm; ends in logits."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(11, 8)(inputs)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 4, dropout=0.2)(x, x)])
    x = layers.LayerNormalization()(x)
    x = layers.Dense(5)(layers.GlobalAveragePooling1D()(layers.Dense(6, activation="gelu")(x)))
    return keras.Model(inputs, x)


def perceptron():
    return keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="relu"), layers.Dense(2)])


@pytest.fixture(scope="module", params=[convolutional, attention], ids=lambda f: f.__name__)
def traced(request):
    keras.utils.set_random_seed(0)
    model = request.param()
    return model, trace_step(model, 2)


def feeds_of(step: TracedStep) -> list[Any]:
    rng = np.random.default_rng(1)
    captured = {placeholder.name for _, placeholder in step.function.graph.captures}
    return [
        tf.constant(rng.integers(0, 5, t.shape) if t.dtype.is_integer else rng.normal(size=t.shape), t.dtype)
        for t in step.function.graph.inputs if t.name not in captured
    ]  # fmt: skip


def test_the_traced_step_has_the_gradients_of_keras(traced):
    model, step = traced
    x, y = feeds_of(step)
    before = state_of(model.variables)
    found = step.function([x], [y])
    put_state(model.variables, before)
    logits = model.layers[-1].activation.__name__ == "linear"
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)(y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    put_state(model.variables, before)
    np.testing.assert_allclose(float(found[0]), float(loss), rtol=1e-6)
    for ours, theirs in zip(found[1], gradients, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(ours).numpy(), tf.convert_to_tensor(theirs).numpy(), rtol=1e-5, atol=1e-7
        )


def test_signatures_rebuild_every_operation(traced):
    _, step = traced
    rng = np.random.default_rng(0)
    rebuilt = {"": None}
    for op in step.graph.operations:
        text = op.work.signature
        assert text or op.kind == "AssignVariableOp"
        if text not in rebuilt:
            description = json.loads(text)
            tensors = [
                None if "c" in entry else tf.cast(tf.constant(rng.uniform(0.1, 1.0, entry["t"])), entry["d"])
                for entry in description["inputs"]
            ]
            rebuilt[text] = [t.numpy().nbytes for t in nodes.run_signature(description, tensors)]
        if text:
            assert rebuilt[text] == [step.graph.values[v].bytes for v in op.outputs], (op.kind, text)


# --- counts --------------------------------------------------------------------------------------


def test_perceptron_by_hand():
    """Dense 4-3 relu, Dense 3-2, batch 5: every operation, byte and FLOP written out."""
    graph = operation_graph(perceptron(), 5, name="p")
    found = [(op.kind, [graph.values[v].bytes for v in op.outputs], op.work.flops) for op in graph.operations]
    assert found == [
        ("MatMul", [60], 2 * 5 * 4 * 3),
        ("BiasAdd", [60], 15),
        ("Relu", [60], 15),
        ("MatMul", [40], 2 * 5 * 3 * 2),
        ("BiasAdd", [40], 10),
        ("Cast", [40], 0),  # labels, int32 to int64
        ("SparseSoftmaxCrossEntropyWithLogits", [20, 40], 80),  # losses and the logits' gradient
        ("Mean", [4], 5),
        ("Mul", [40], 10),
        ("BiasAddGrad", [8], 10),
        ("MatMul", [60], 2 * 5 * 3 * 2),
        ("MatMul", [24], 2 * 5 * 3 * 2),
        ("ReluGrad", [60], 15),
        ("BiasAddGrad", [12], 15),
        ("MatMul", [48], 2 * 5 * 4 * 3),
    ]
    assert graph.loss == 7
    assert [op.is_backward for op in graph.operations] == [False] * 8 + [True] * 7
    assert [v.bytes for v in graph.values if v.keep] == [4, 8, 24, 12, 48]  # the loss and four gradients
    # parameters 12 + 3 + 6 + 2, inputs 5 x 4, labels 5; float32 and int32
    assert graph.fixed_bytes == 4 * (23 + 20 + 5)
    trace = remat.simulate(graph, remat.Plan.from_order(graph, range(len(graph))))
    # while SparseSoftmax runs: relu 60 (the MatMuls and BiasAdds are gone), logits 40, labels 40, losses 20 and 40
    assert trace.running_bytes[6] - graph.fixed_bytes == 60 + 40 + 40 + 20 + 40
    # fullest at ReluGrad: the loss 4, two gradients 8 and 24, relu 60, its gradient 60, the result 60
    assert trace.order[trace.peak_computation] == 12
    assert trace.peak_bytes - graph.fixed_bytes == 4 + 8 + 24 + 60 + 60 + 60
    assert graph.operations[0].work.bytes_moved == 4 * (5 * 4 + 4 * 3 + 5 * 3)


def test_flops_agree_with_the_profiler_of_tensorflow(traced):
    """Per operation against TensorFlow's own registered statistics, where it has any."""
    from tensorflow.python.framework import ops
    from tensorflow.python.profiler.internal import flops_registry  # noqa: F401  (registers the statistics)

    _, step = traced
    compared = Counter()
    for op, node in zip(step.graph.operations, step.nodes, strict=True):
        statistics = ops.get_stats_for_node_def(node.graph, node.node_def, "flops").value
        # it counts RsqrtGrad 4, Rsqrt and SquaredDifference 2 per element, and the division by a window's area
        if not statistics or node.type in ("Rsqrt", "RsqrtGrad", "SquaredDifference", "AvgPoolGrad", "MaxPoolGrad"):
            continue
        # and it takes the wrong axis of a transposed batched product (it reads an attribute that is not there)
        if node.type == "BatchMatMulV2" and node.get_attr("adj_x"):
            continue
        # reductions: it charges n - 1 additions for n elements
        slack = step.graph.values[op.outputs[0]].bytes // 4 if node.type in ("Sum", "BiasAddGrad", "Mean") else 0
        assert abs(op.work.flops - statistics) <= slack, (node.type, op.work.flops, statistics)
        compared[node.type] += 1
    assert sum(compared.values()) > 20
    assert compared["MatMul"] >= 3
    assert [op.kind for op in step.graph.operations if op.work.flops is None] == []


def test_aliases_and_constants_are_no_operations_and_state_updates_run_once(traced):
    model, step = traced
    assert not {op.kind for op in step.graph.operations} & {
        "Reshape", "Squeeze", "ExpandDims", "Identity", "StopGradient", "ReadVariableOp", "Const", "Shape", "ShapeN",
        "BroadcastGradientArgs", "StridedSlice", "Pack", "InvertPermutation",
    }  # fmt: skip
    once = [op.kind for op in step.graph.operations if op.run_once]
    assert once == ["AssignVariableOp"] * sum("moving" in v.path or "seed" in v.path for v in model.variables)
    assert any(op.kind.startswith("StatelessRandom") for op in step.graph.operations)  # dropout may repeat


# --- what a trace may hold besides plain operations -----------------------------------------------


class Odd(layers.Layer):
    """A nested tf.function, a custom gradient, a stateful random number and a branch."""

    def call(self, x):
        @tf.function
        def nested(x):
            return tf.math.tanh(x)

        @tf.custom_gradient
        def halved(x):
            return tf.math.square(x), lambda upstream: upstream / 2

        x = halved(nested(x)) + tf.random.uniform(tf.shape(x))
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: tf.math.exp(x))


def test_nested_functions_are_inlined_and_branches_are_opaque():
    inputs = keras.Input((4,))
    graph = operation_graph(keras.Model(inputs, layers.Dense(3)(Odd()(layers.Dense(4)(inputs)))), 2)
    kinds = Counter(op.kind for op in graph.operations)
    assert kinds["Tanh"] == kinds["Square"] == 1
    assert not [kind for kind in kinds if "PartitionedCall" in kind or kind == "IdentityN"]
    assert [op.kind for op in graph.operations if op.run_once] == ["RandomUniform"]
    works = {(op.work.flops, op.work.signature) for op in graph.operations if op.kind in ("If", "StatelessIf")}
    assert works == {(None, "")}


def test_regularization_is_part_of_the_loss():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5))])
    step = trace_step(model, 5)
    x, y = feeds_of(step)
    loss = step.function([x], [y % 2])[0]
    plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y % 2, model(x))
    decay = 0.5 * np.square(model.layers[0].kernel.numpy()).sum()
    np.testing.assert_allclose(float(loss), float(plain) + decay, rtol=1e-5)


# --- recurrent layers ----------------------------------------------------------------------------


def test_a_recurrent_layer_is_one_operation_with_the_work_of_all_turns():
    steps, batch, units, features = 5, 2, 2, 3
    inputs = keras.Input((steps, features))
    model = keras.Model(inputs, layers.Dense(4, activation="softmax")(layers.LSTM(units)(inputs)))
    graph = operation_graph(model, batch)
    forward, backward = (op for op in graph.operations if "While" in op.kind)
    assert (forward.is_backward, backward.is_backward, forward.run_once) == (False, True, False)
    matmuls = steps * 2 * batch * 4 * units * (features + units)
    assert matmuls < forward.work.flops < 2 * matmuls
    assert 2 * matmuls < backward.work.flops < 4 * matmuls
    # what the backward loop reads: one list of (batch, units) per stored gate and state, for every turn
    sizes = [graph.values[v].bytes for v in forward.outputs]
    assert 7 <= sizes.count(steps * batch * units * 4) <= 9
    # copies of the weights in every turn would be references, not storages
    assert steps * units * 4 * units * 4 not in sizes


# --- errors and imports --------------------------------------------------------------------------


def test_bad_arguments_are_one_line():
    inputs = keras.Input((None, None, 3))
    open_model = keras.Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(2, 3)(inputs)))
    for model, arguments, message in (
        (perceptron(), {"batch_size": 0}, "batch_size"),
        (perceptron(), {"batch_size": 2, "dtype": "int8"}, "dtype 'int8'"),
        (perceptron(), {"batch_size": 2, "dtype": "bfloat16"}, "mixed_bfloat16"),
        (open_model, {"batch_size": 2}, "unknown sizes"),
    ):
        with refused(message):
            operation_graph(model, **arguments)


def test_mixed_precision_halves_activations():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        graph = operation_graph(perceptron(), 5, dtype="bfloat16")
    finally:
        keras.config.set_dtype_policy(before)
    first = next(op for op in graph.operations if op.kind == "MatMul")
    assert (first.work.dtype, graph.values[first.outputs[0]].bytes) == ("bfloat16", 5 * 3 * 2)
    assert graph.fixed_bytes == 4 * (23 + 5 * 4 + 5)  # variables and the batch stay float32
