"""Losses and metrics of `rtf.compile` and `rtf.rematerialize` are those of `Model.compile`: masks, weights, outputs."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from helpers import refused
from tf_helpers import QUICK, built, keras, layers, specs_of, state_of

import remat.tf as rtf

pytestmark = pytest.mark.usefixtures("tf_cache", "kernels_not_measured")

FUNCTIONS = sorted(
    n for n, v in vars(keras.losses).items() if inspect.isfunction(v) and "y_pred" in inspect.signature(v).parameters
)
CLASSES = sorted(n for n, v in vars(keras.losses).items() if inspect.isclass(v) and n != "Loss")
PADDED = np.array([[3, 1, 4, 1, 0, 0], [5, 0, 0, 0, 0, 0], [2, 6, 5, 3, 5, 8]])
RATE = 0.5


def tagger(heads=("head",)):
    """A class for each token; id 0 is padding, which a mask leaves out of the loss."""
    inputs = keras.Input((6,), dtype="int32")
    # Without gradients here, each head's weights show one loss.
    x = layers.Embedding(9, 4, mask_zero=True, trainable=len(heads) == 1)(inputs)
    outputs = [layers.Dense(9, activation="softmax", name=f"{name}_")(x) for name in heads]
    return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0])


def labels_for(name):
    kind = name.lower().replace("_", "")
    if kind.startswith(("sparse", "categoricalgeneralized", "ctc", "crossentropy")):
        return (PADDED + 1) % 9
    return np.eye(9, dtype="float32")[(PADDED + 1) % 9]


def weights_after(step_of, factory, x, y, *w):
    """All weights after two steps of gradient descent with the step that `step_of` makes of the model."""
    model = built(factory)
    step = step_of(model)
    for _ in range(2):
        step(x, y, *w)
    return state_of(model.variables)


def kerass_own(loss):
    """The step of ``model.fit``, run eagerly."""

    def step_of(model):
        model.compile(keras.optimizers.SGD(RATE), loss, run_eagerly=True)
        return model.train_on_batch

    return step_of


def compiled(loss, *batch):
    x, y, weight_spec = (*specs_of(batch), None)[:3]
    return lambda model: rtf.compile(
        model, loss, keras.optimizers.SGD(RATE), x, y, budget="1GB", weight_spec=weight_spec, **QUICK
    )


def rematerialized(loss, *batch):
    """The gradients alone, applied by hand."""

    def step_of(model):
        step = rtf.rematerialize(model, specs_of(batch), "1GB", loss=loss, **QUICK)
        optimizer = keras.optimizers.SGD(RATE)
        return lambda *given: optimizer.apply(step(*given)[1], model.trainable_variables)

    return step_of


def assert_as_keras(factory, loss, *batch, ways=(compiled, rematerialized)):
    """The weights have the bits of Keras's, and every trained one moves."""
    wanted = weights_after(kerass_own(loss), factory, *batch)
    model = built(factory)
    names = [v.path for v in model.variables if v.trainable]
    for name, start, after in zip(names, state_of(model.trainable_variables), wanted[-len(names) :], strict=True):
        assert (start != after).any(), f"no loss changes {name}"
    for way in ways:
        found = weights_after(way(loss, *batch), factory, *batch)
        unequal = [v.path for v, a, b in zip(model.variables, found, wanted, strict=True) if a.tobytes() != b.tobytes()]
        assert not unequal, way.__name__


def test_every_name_of_keras_is_what_it_is_in_compile():
    """One output for each, as a name or an object."""
    names = [n for n in (*FUNCTIONS, *CLASSES, "mse", "crossentropy") if n.lower() not in ("circle", "ctc")]
    names.remove("categorical_generalized_cross_entropy")  # wants a third argument
    losses = [keras.losses.CategoricalGeneralizedCrossEntropy() if "Generalized" in n else n for n in names]
    assert len(losses) > 40
    assert_as_keras(lambda: tagger(heads=names), losses, PADDED, [labels_for(n) for n in names], ways=[compiled])


def ranked():
    """A mask for each sample, and an output of one vector for each sample."""

    class Marked(layers.Layer):
        def compute_mask(self, x, mask=None):
            return keras.ops.any(x != 0, axis=-1)

        def call(self, x):
            return x

    return keras.Sequential([keras.Input((6,)), Marked(), layers.Dense(5, kernel_regularizer="l2")])


@pytest.mark.parametrize("loss", ["circle", lambda y, p: keras.ops.sum(keras.ops.square(y - p), axis=-1)])
def test_masked_samples(loss):
    x = np.random.default_rng(0).normal(size=(6, 6)).astype("float32") * [[1], [0], [1], [1], [0], [1]]
    y = np.array([0, 1, 0, 1, 0, 0]) if loss == "circle" else np.ones((6, 5), "float32")
    assert_as_keras(ranked, loss, x.astype("float32"), y)


@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight", None])
def test_reductions_and_sample_weights(reduction):
    """Weights of tokens and of samples, under a mask; a loss that is not reduced is differentiated as its sum."""
    loss, y = keras.losses.SparseCategoricalCrossentropy(reduction=reduction), labels_for("sparse")
    tokens = np.random.default_rng(1).uniform(0.1, 2.0, (3, 6)).astype("float32")
    assert_as_keras(tagger, loss, PADDED, y, tokens, ways=[rematerialized])
    assert_as_keras(tagger, loss, PADDED, y, tokens[:, :1], ways=[compiled])


def by_name():
    x = inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, embeddings_regularizer="l2")(x)
    return keras.Model(inputs, {n: layers.Dense(9, activation="softmax", name=n)(x) for n in ("b", "a")})


def test_outputs_by_name_with_weights_and_one_without_a_loss():
    y = {"a": labels_for("sparse"), "b": labels_for("mse")}
    w = {n: np.random.default_rng(i).uniform(size=(3, 6)).astype("float32") for i, n in enumerate("ab")}
    assert_as_keras(by_name, {"a": "ce", "b": "mse"}, PADDED, y, w)
    model = built(by_name)
    step = compiled({"a": "ce", "b": None}, PADDED, y)(model)
    kernel = model.get_layer("b").kernel.numpy()
    step(PADDED, y)
    assert (model.get_layer("b").kernel.numpy() == kernel).all()


def test_losses_and_labels_that_do_not_belong_to_the_outputs_are_refused():
    """What could be mistaken too: a dict's order is not that of a list."""
    by, labels = {"a": "ce", "b": "mse"}, labels_for("sparse")
    named = {"a": labels, "b": labels_for("mse")}
    for factory, loss, y, says in (
        (tagger, None, labels, "give loss="),
        (tagger, [None], labels, "give loss="),
        (tagger, "entropy of some kind", labels, "is no Keras loss"),
        (by_name, by, [*named.values()], "labels as a dict with the keys"),
        (by_name, [*by.values()], named, "losses as a dict with the keys"),
        (by_name, {"a": "ce"}, named, r"losses for \['a'\], outputs \['.*', '.*'\]"),
    ):
        specs = specs_of((PADDED, y))
        with refused(says):
            rtf.compile(factory(), loss, "sgd", *specs, budget="1GB")
        with refused(says):
            rtf.rematerialize(factory(), specs, "1GB", loss=loss)


NAMED = ["accuracy", "sparse_top_k_categorical_accuracy", "sparse_categorical_crossentropy"]


def first_of(_labels, prediction):
    return prediction[..., 0]


@pytest.mark.parametrize(
    ("factory", "loss", "metrics_of", "y", "name"),
    [
        (tagger, "ce", lambda: [*NAMED, keras.metrics.SparseCategoricalAccuracy(), first_of], labels_for("sparse"),
         "metrics"),
        (tagger, "ce", lambda: [*NAMED, first_of], labels_for("sparse"), "weighted_metrics"),
        (by_name, {"a": "ce", "b": "mse"}, lambda: {"a": NAMED, "b": [keras.metrics.MeanAbsoluteError(), "mse"]},
         {"a": labels_for("sparse"), "b": labels_for("mse")}, "weighted_metrics"),
    ],
    ids=["masked", "weighted", "by name"],
)  # fmt: skip
def test_metrics_are_what_they_are_in_compile(factory, loss, metrics_of, y, name):
    x, weights = PADDED, np.random.default_rng(2).uniform(0.1, 2.0, (3, 6)).astype("float32")
    w = dict.fromkeys(y, weights) if isinstance(y, dict) else weights
    keras_model = built(factory)
    keras_model.compile(keras.optimizers.SGD(RATE), loss, run_eagerly=True, **{name: metrics_of()})
    step = rtf.compile(
        built(factory), loss, keras.optimizers.SGD(RATE), *specs_of((x, y)), "1GB", weight_spec=specs_of(w),
        **{name: metrics_of()}, **QUICK,
    )  # fmt: skip
    for _ in range(2):
        theirs = keras_model.train_on_batch(x, y, w, return_dict=True)  # of this batch alone
        step.metrics.reset_state()
        step(x, y, w)
        mine = {name: float(value) for name, value in step.metrics.result().items()}
        assert mine == {name: value for name, value in theirs.items() if not name.endswith("loss")}
        assert len(mine) == len(keras.tree.flatten(metrics_of()))
