"""Keras-layer graphs against the published ones, hand-made graphs and TensorFlow's own counter."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import refused, run_python

from remat.errors import MissingPackage
from remat.extraction import extract
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.plan import Plan
from remat.simulator import simulate
from remat.tf import models as frontend

CONF = Path(__file__).parents[1] / "conf" / "model"
SEGMENTATION = "remat.tf.networks.segmentation"


def spec(target: str, batch_size: int = 1, size: tuple[int, ...] = (224, 224, 3), **rest: Any) -> ModelSpec:
    module = SEGMENTATION if target.islower() else "keras.applications"
    return ModelSpec(target.lower(), "keras", f"{module}:{target}", batch_size, size, "layer", **rest)


@pytest.fixture(scope="module")
def keras() -> Any:
    pytest.importorskip("tensorflow")
    return frontend.import_keras()


@pytest.fixture(scope="module")
def vgg19(keras: Any) -> Graph:
    return extract(spec("VGG19", accounting="published"))


def reads(graph: Graph, name: str) -> set[str]:
    op = next(op for op in graph.operations if op.name == name)
    return {graph.values[v].name for v in op.inputs}


# Published numbers -------------------------------------------------------------------------------------------


def test_vgg19_fixed_bytes(vgg19: Graph) -> None:
    parameters = 143_667_240  # Simonyan and Zisserman 2015, table 2: 144 million
    assert vgg19.fixed_bytes == 2 * 4 * parameters
    assert extract(spec("VGG19", 3)).fixed_bytes == 2 * 4 * parameters + 3 * 224 * 224 * 3 * 4


def test_single_operation_limits_the_batch_as_published(keras: Any) -> None:
    for accounting, expected in (("published", 289), ("exact", 285)):
        one, two = (extract(spec("VGG19", b, accounting=accounting)).largest_working_set()[0] for b in (1, 2))
        assert (16 * 10**9 - (one - (two - one))) // (two - one) == expected


def _nodes(graph: Graph) -> list[tuple[str, int, bool]]:
    return [(op.name, graph.values[k].bytes, op.is_backward) for k, op in enumerate(graph.operations)]


@pytest.mark.parametrize(
    ("target", "batch_size", "size", "file"),
    [("VGG16", 256, (224, 224, 3), "vgg16_b256"), ("unet", 32, (416, 608, 3), "unet_b32")],
)
def test_equals_the_published_graph(
    keras: Any, instances: Path, target: str, batch_size: int, size: tuple[int, ...], file: str
) -> None:
    """Names, bytes, order and edges of every node."""
    published = json.loads((instances / "v100" / f"{file}.json").read_text())
    graph = extract(spec(target, batch_size, size))
    assert _nodes(graph) == [(node["name"], node["bytes"], node["backward"]) for node in published["nodes"]]
    assert {(u, v) for v in range(len(graph)) for u in graph.predecessors(v)} == set(map(tuple, published["edges"]))
    assert graph.loss == published["loss"]


def test_mobilenet_equals_the_published_graph_up_to_keras_versions(keras: Any, instances: Path) -> None:
    """Keras 2's MobileNet pads before its first convolution and reshapes after pooling; Keras 3's does not."""
    published = json.loads((instances / "v100" / "mobilenet_b512.json").read_text())
    gone = {f"{name}{end}" for name in ("conv1_pad", "reshape_1") for end in ("", "_backward")}
    theirs = [
        (node["name"].replace("act_softmax", "predictions"), node["bytes"], node["backward"])
        for node in published["nodes"] if node["name"] not in gone
    ]  # fmt: skip
    assert _nodes(extract(spec("MobileNet", 512))) == theirs


# Structure ---------------------------------------------------------------------------------------------------


def layer_graph(model: Any, **arguments: Any) -> Graph:
    from remat.tf.layer_graph import layer_graph

    return layer_graph(model, **({"batch_size": 2, "name": "test"} | arguments))


def test_gradients_of_a_diamond_read_what_they_should(keras: Any) -> None:
    x = keras.Input((4,))
    a = keras.layers.Dense(3, name="a")(x)
    b, c = keras.layers.Dense(3, name="b")(a), keras.layers.Dense(3, name="c")(a)
    graph = layer_graph(keras.Model(x, keras.layers.Add(name="d")([b, c])))
    backward = {
        "d_backward": {"d", "Loss"}, "c_backward": {"c", "d", "d_backward"}, "b_backward": {"b", "d", "d_backward"},
        "a_backward": {"a", "b", "c", "b_backward", "c_backward"},
    }  # fmt: skip
    assert [op.name for op in graph.operations] == ["a", "b", "c", "d", "Loss", *backward]
    assert {name: reads(graph, name) for name in ("a", *backward)} == {"a": set()} | backward
    assert graph.value_bytes.tolist() == [24, 24, 24, 24, 8, 24, 24, 24, 24]
    parameters = (4 * 3 + 3) + 2 * (3 * 3 + 3)
    assert graph.fixed_bytes == 2 * 4 * parameters + 2 * 4 * 4


def test_a_shared_layer_is_one_operation_per_call_and_counts_once(keras: Any) -> None:
    shared = keras.layers.Dense(4, name="s")
    x, y = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([x, y], keras.layers.Concatenate(name="join")([shared(shared(x)), shared(y)]))
    graph = layer_graph(model, accounting="published")
    calls = {op.name: op for op in graph.operations if op.name.startswith("s") and not op.is_backward}
    assert len(calls) == 3
    assert graph.fixed_bytes == 2 * 4 * (4 * 4 + 4)
    assert sum(op.work.published_flops for op in calls.values()) == 3 * 2 * 4 * 4


def test_nested_models_are_inlined_even_when_called_twice(keras: Any) -> None:
    block_in = keras.Input((6,))
    block = keras.Model(block_in, keras.layers.ReLU(name="r")(keras.layers.Dense(6, name="f")(block_in)), name="block")
    tail = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, name="out")], name="tail")
    x = keras.Input((6,))
    graph = layer_graph(keras.Model(x, tail(block(block(x)))))
    names = ["block/f", "block/r", "block/f#2", "block/r#2", "tail/out"]
    assert [op.name for op in graph.operations[: graph.loss]] == names
    assert (reads(graph, "block/f#2"), reads(graph, "tail/out")) == ({"block/r"}, {"block/r#2"})


def test_several_outputs_all_reach_the_loss_and_are_values_of_their_own(keras: Any) -> None:
    x = keras.Input((4,))
    a = keras.layers.Dense(4, name="a")(x)
    b = keras.layers.Dense(2, name="b")(a)
    graph = layer_graph(keras.Model(x, [a, b]))
    assert reads(graph, "Loss") == {"a", "b"}
    assert reads(graph, "a_backward") == {"a", "b", "b_backward", "Loss"}
    x = keras.Input((5, 3))
    sequence, state = keras.layers.GRU(4, return_sequences=True, return_state=True, name="g")(x)
    model = keras.Model(x, [keras.layers.Flatten(name="flat")(sequence), keras.layers.Dense(1, name="d")(state)])
    graph = layer_graph(model)
    for op in (graph.operations[0], graph.operations[-1]):
        assert [graph.values[v].bytes for v in op.outputs] == [2 * 5 * 4 * 4, 2 * 4 * 4]
    assert reads(graph, "d") == {"g:1"}
    assert reads(graph, "g_backward") == {"g:0", "g:1", "flat", "d", "flat_backward", "d_backward"}


def test_sequential_models_and_half_precision(keras: Any) -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    single, half = layer_graph(model), layer_graph(model, dtype="float16")
    assert (single.value_bytes.tolist(), half.value_bytes.tolist()) == ([32, 8, 32], [16, 8, 16])
    assert half.fixed_bytes == single.fixed_bytes // 2
    by_policy = extract(spec("VGG16", 1, (32, 32, 3), dtype="bfloat16"))
    assert by_policy.value_bytes[0] == 2 * 32 * 32 * 64
    assert keras.config.dtype_policy().name == "float32"


def mixed() -> Any:
    """A factory with a mixed-precision policy of its own."""
    import keras

    keras.config.set_dtype_policy("mixed_bfloat16")
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(2, dtype="float32")])


@pytest.mark.parametrize("granularity", ["layer", "operation"])
def test_a_policy_of_the_factory_stays(keras: Any, granularity: str) -> None:
    graph = extract(ModelSpec("mixed", "keras", f"{__name__}:mixed", 3, granularity=granularity))
    types = [op.work.dtype for op in graph.operations]
    assert {"bfloat16", "float32"} <= set(types)
    if granularity == "layer":  # Dense in bfloat16, Dense in float32, the loss; parameters are float32
        assert graph.value_bytes.tolist()[:2] == [3 * 4 * 2, 3 * 2 * 4]
        parameters, batch = 4 * (8 * 4 + 4 + 4 * 2 + 2), 3 * 8
        assert graph.fixed_bytes - 2 * parameters in (2 * batch, 4 * batch)  # Keras' inputs follow the policy or not
    assert keras.config.dtype_policy().name == "float32"


def test_extraction_repeats_exactly_and_leaves_name_counters_alone(keras: Any) -> None:
    def number() -> int:
        return int(keras.layers.Dense(1).name.partition("_")[2] or 0)

    before = number()
    first, second = (extract(spec("unet", 1, (64, 64, 3))) for _ in range(2))
    assert first == second
    assert number() == before + 1


def test_models_without_a_layer_graph_are_refused(keras: Any) -> None:
    with refused("subclassed"):
        layer_graph(type("Subclassed", (keras.Model,), {})())
    x = keras.Input((None, None, 3))
    with refused("open axis"):
        layer_graph(keras.Model(x, keras.layers.Conv2D(1, 1)(x)))


# Work --------------------------------------------------------------------------------------------------------


def works(graph: Graph, name: str) -> tuple[Any, Any]:
    by_name = {op.name: op.work for op in graph.operations}
    return by_name[name], by_name[f"{name}_backward"]


def test_work_of_convolutions_by_hand(keras: Any) -> None:
    x = keras.Input((8, 8, 3))
    y = keras.layers.Conv2D(5, 3, padding="same", activation="relu", name="first")(x)
    y = keras.layers.Conv2D(7, 3, strides=2, padding="same", use_bias=False, name="second")(y)
    graph = layer_graph(keras.Model(x, y))
    first, first_gradient = works(graph, "first")
    elements, macs = 2 * 8 * 8 * 5, 2 * 8 * 8 * 5 * 9 * 3
    assert (first.published_flops, first.flops) == (macs, 2 * macs + 2 * elements)
    assert first.bytes_moved == 4 * (2 * 8 * 8 * 3 + elements + 5 * 9 * 3 + 5)
    # Its inputs are the network's: only the weights need a gradient.
    assert (first_gradient.published_flops, first_gradient.flops) == (2 * macs, 2 * macs + 2 * elements)
    macs = 2 * 4 * 4 * 7 * 9 * 5
    second, second_gradient = works(graph, "second")
    assert (second.published_flops, second.flops) == (macs, 2 * macs)
    assert (second_gradient.published_flops, second_gradient.flops) == (2 * macs, 4 * macs)
    kernel, output = 7 * 9 * 5, 2 * 4 * 4 * 7
    assert second_gradient.bytes_moved == 4 * (output + 2 * kernel + 2 * elements)


def test_published_counts_of_other_layers(keras: Any) -> None:
    """The artifact's rules, layer by layer, on a 4 x 4 x 6 map."""
    layers = keras.layers
    x = keras.Input((4, 4, 6))
    n = 4 * 4 * 6
    expected = {
        layers.BatchNormalization(): 4 * n, layers.ReLU(): n, layers.Activation("softmax"): n,
        layers.MaxPooling2D(): 0, layers.ZeroPadding2D(): 0, layers.Flatten(): 0, layers.Dropout(0.5): 0,
        layers.UpSampling2D(): 4 * n, layers.DepthwiseConv2D(3, padding="same"): 9 * n,
        layers.Conv2DTranspose(2, 2, strides=2): 6 * 8 * 8 * 2,
        layers.SeparableConv2D(5, 3, padding="same"): (9 + 5) * n,
    }  # fmt: skip
    for layer, count in expected.items():
        graph = layer_graph(keras.Model(x, layer(x)), batch_size=1)
        assert graph.operations[0].work.published_flops == count, layer


def test_nothing_flows_into_frozen_layers(keras: Any) -> None:
    x = keras.Input((4,))
    frozen = keras.layers.Dense(4, name="frozen", trainable=False)(x)
    model = keras.Model(x, keras.layers.Dense(2, name="head")(keras.layers.ReLU(name="relu")(frozen)))
    graph = layer_graph(model)
    for name in ("frozen", "relu"):
        assert (works(graph, name)[1].flops, works(graph, name)[1].bytes_moved) == (0, 0)
    assert works(graph, "head")[1].flops == 2 * 2 * 4 * 2 + 2 * 2  # weight gradient and bias only


def test_layers_of_the_users_own(keras: Any) -> None:
    """A subclass of a Keras layer counts as that layer; an unknown layer has no count; neither can be rebuilt."""

    class Standardised(keras.layers.Conv2D):
        pass

    class MyPooling(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x[:, ::2, ::2] * 0.5

    x = keras.Input((4, 4, 3))
    graph = layer_graph(keras.Model(x, MyPooling()(Standardised(2, 1, use_bias=False)(x)) + 1.0))
    convolution, pooling, plus = (op.work for op in graph.operations[: graph.loss])
    assert (convolution.flops, convolution.published_flops, convolution.signature) == (2 * 192, 192, "")
    assert (pooling.flops, pooling.published_flops, pooling.signature) == (None, None, "")
    assert pooling.bytes_moved == 4 * (64 + 16)
    assert plus.signature == ""


def test_flops_agree_with_those_of_the_traced_step(keras: Any) -> None:
    """Multiply-adds of a whole training step, exactly; `test_tensorflow_ops` compares those with TensorFlow's own."""
    from remat.tf.operation_graph import operation_graph

    layers = keras.layers
    x = keras.Input((32, 32, 3))
    y = layers.Conv2D(16, 3, padding="same", use_bias=False)(x)
    y = layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False)(layers.ReLU()(y))
    y = layers.Conv2DTranspose(8, 4, strides=2, padding="same", use_bias=False)(y)
    model = keras.Model(x, layers.Dense(10, use_bias=False)(layers.Flatten()(y)))
    found = [
        sum(op.work.flops for op in graph.operations if op.kind.startswith(("Conv", "Dense", "MatMul")))
        for graph in (layer_graph(model), operation_graph(model, 2))
    ]
    assert found[0] == found[1] > 0


def test_signatures_rebuild_their_layers(keras: Any, vgg19: Graph) -> None:
    for k, op in enumerate(vgg19.operations[: vgg19.loss]):
        content = json.loads(op.work.signature)
        assert (content["fw"], content["backward"]) == ("keras", False)
        layer = getattr(keras.layers, content["class"]).from_config(content["config"])
        assert 4 * math.prod(layer.compute_output_shape(tuple(content["inputs"][0]))) == vgg19.values[k].bytes
    assert len({op.work.signature for op in vgg19.operations}) < len(vgg19)  # names do not keep equal layers apart
    assert json.loads(vgg19.operations[-1].work.signature)["backward"] is True


# Models and errors -------------------------------------------------------------------------------------------


def test_importing_the_frontend_imports_no_framework() -> None:
    code = "import sys, remat.tf.models, remat.tf.networks.segmentation, remat.tf.operation_graph; print(*sys.modules)"
    assert not {"keras", "tensorflow", "torch"} & {*run_python(code).split()}


def test_bad_input_is_refused_without_importing_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", None)
    for bad, word in (
        (spec("VGG16", 0), "batch_size"),
        (spec("VGG16", 1, (16, 16, 3)), "too small"),
        (spec("InceptionV3", 1, (74, 75, 3)), "75x75"),
        (spec("VGG16", 1, (224, 224)), "channels"),
        (spec("VGG16", 1, (224, -1, 3)), "positive"),
        (spec("VGG16", dtype="float8"), "dtype"),
        (spec("unet", 1, (416, 600, 3)), "multiples of 32"),
        (spec("unet", 1, (416, 608, 3), options={"encoder": "vg"}), "did you mean vgg"),
        (spec("unet", 1, (416, 608, 3), options={"depth": 3}), "depth"),
        (spec("unet", 1, (416, 608, 3), options={"classes": 0}), "classes"),
    ):
        with refused(word):
            extract(bad)
    with pytest.raises(MissingPackage, match=r"pip install 'remat\[tensorflow\]'"):
        extract(spec("VGG16"))


def test_what_keras_refuses_is_one_line(keras: Any) -> None:
    for bad in (spec("VGG16", options={"clases": 3}), spec("VGG16", options={"classes": -3}), spec("VGG20")):
        with refused():
            extract(bad)


@pytest.mark.parametrize(
    ("network", "encoder"),
    [("unet", "vgg"), ("unet", "mobilenet"), ("fcn8", "resnet50"), ("segnet", "plain"), ("pspnet", "resnet50")],
)
def test_segmentation_networks_on_every_encoder(keras: Any, network: str, encoder: str) -> None:
    graph = extract(spec(network, 1, (64, 96, 3), options={"encoder": encoder}))
    # One score per class and pixel: at half the resolution, at a quarter, and 8 times FCN's 1/8 map plus a rim.
    pixels = {"unet": 32 * 48, "segnet": 32 * 48, "pspnet": 16 * 24, "fcn8": (8 * 7 + 16) * (8 * 11 + 16)}
    assert graph.values[graph.loss - 1].bytes == 4 * 19 * pixels[network]
    assert all(op.work.flops is not None and op.work.signature for op in graph.operations)


CONFIGURED = [entry for file in sorted(CONF.glob("*.yaml"))
              if (entry := yaml.safe_load(file.read_text()))["framework"] != "torch"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("entry", CONFIGURED, ids=lambda entry: entry["name"])
def test_every_configured_model_extracts(keras: Any, entry: dict[str, Any]) -> None:
    fields = {key: entry[key] for key in ("name", "framework", "target", "batch_size", "granularity", "options")}
    graph = extract(ModelSpec(**fields, input_size=tuple(entry["input_size"])))
    assert len(graph) > 10
    assert simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes > graph.fixed_bytes
