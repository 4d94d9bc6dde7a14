"""MONeT's training graphs: against the published ones, by hand, and every implementation in the simulator."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

import remat
from remat import Graph, InvalidInput, Plan, Status, simulate
from remat.cost import apply_cost, load_gpu
from remat.frontends.monet import BATCHES, NETWORKS, monet_graph, training_graph, with_gist
from remat.frontends.monet_networks import Network
from remat.implementation import Implementation

PUBLISHED = ("resnet50", "unet", "vgg16")  # networks with a profile
PYTORCH_GIB = {"resnet50": 15.06, "googlenet": 14.93, "unet": 14.32, "mobilenet_v2": 14.46, "vgg16": 14.12}


def tiny(convolutions: int = 1) -> Network:
    """Convolutions with ReLU, max pooling, a linear layer; sizes are whole KiB."""
    net = Network((2, 4, 16, 16))
    x = 0
    for _ in range(convolutions):
        x = net.relu(net.conv(x, 8, 3))
    net.linear(net.flatten(net.max_pool(x, 2, 2)), 256)
    return net


def leaky() -> Network:
    """Batch normalization, leaky ReLU, dropout and an addition in place."""
    net = Network((2, 4, 16, 16))
    x = net.elementwise("leaky_relu_", net.norm(net.conv(0, 8, 3)))
    y = net.relu(net.elementwise("add_", net.norm(net.conv(x, 8, 3)), x))
    net.linear(net.flatten(net.resize(net.dropout(y), 2, 2)), 256)
    return net


def running(graph: Graph, plan: Plan) -> list[int]:
    """Bytes held beside the fixed ones while each operation runs."""
    return (simulate(graph, plan).running_bytes - graph.fixed_bytes).tolist()


def plain_pytorch(graph: Graph) -> Plan:
    """What PyTorch executes by default: in place, ReLU's backward from its output, int64 indices, everything kept.

    Unlike PyTorch, the published graphs copy the gradients of ``add``, ``cat`` and ``flatten`` instead of viewing them,
    and dropout's backward reads its output instead of a mask.
    """
    chosen = []
    for op in graph.operations:
        wanted = {"output" if op.is_backward else "in_place", "indices_int64"}
        if op.kind in ("aten::dropout", "aten::batch_norm_ip_grad"):
            wanted.clear()
        chosen.append(next((way.name for way in op.implementations if way.name in wanted), ""))
    return Plan.from_order(graph, range(len(graph)), implementations=chosen)


@pytest.mark.parametrize("name", PUBLISHED)
def test_default_graphs_are_the_published_ones(instances: Path, name: str) -> None:
    published = remat.load_graph(instances / "p100" / f"{name}_b{BATCHES[name]}.json")
    graph = monet_graph(name).default().with_costs([op.cost for op in published.operations], published.cost_unit)
    ours, theirs = (
        [(g.name, g.fixed_bytes, g.loss), [value.bytes for value in g.values],
         [(op.kind, op.inputs, op.is_backward) for op in g.operations]]
        for g in (graph, published)
    )  # fmt: skip
    assert ours == theirs
    assert graph.sha256() == published.sha256()  # all that plans depend on, costs included


@pytest.mark.parametrize(
    ("name", "parameters", "multiply_adds", "operations"),
    [
        # parameters as torchvision counts them (GoogLeNet with both auxiliary heads); multiply-adds per image
        ("resnet50", 25_557_032, 4.09e9, 405),
        ("vgg16", 138_357_544, 15.47e9, 97),
        ("mobilenet_v2", 3_504_872, 0.30e9, 343),
        ("googlenet", 13_004_888, 1.51e9, 495),
    ],
)
def test_networks_are_those_of_torchvision(name: str, parameters: int, multiply_adds: float, operations: int) -> None:
    net = NETWORKS[name](1)
    assert sum(layer.parameters for layer in net.layers) == parameters
    heavy = sum(layer.flops for layer in net.layers if layer.weight_bytes)
    assert heavy / 2 == pytest.approx(multiply_adds, rel=0.01)
    none, joint = (monet_graph(name, 1, implementations=word) for word in ("none", "joint"))
    assert (len(none), none.has_implementations, joint.has_implementations) == (operations, False, True)
    assert joint.default().sha256() == none.sha256()
    if name == "mobilenet_v2":  # 17 convolutions are depthwise, and have one gradient
        kinds = Counter(op.kind for op in none.operations)
        assert [kinds[f"aten::_convolution{end}"] for end in ("", "_param_grad", "_ip_grad")] == [52, 35, 52]


def test_hand_computed_training_graph() -> None:
    graph = training_graph(tiny(), "tiny", implementations="none")
    kinds = [op.kind.removeprefix("aten::") for op in graph.operations]
    assert kinds == [
        "_convolution", "relu_", "max_pool2d", "flatten", "addmm", "loss::loss", "addmm_param_grad", "addmm_ip_grad",
        "flatten_ip_grad", "max_pool2d_ip_grad", "relu__ip_grad", "_convolution_param_grad", "_convolution_ip_grad",
    ]  # fmt: skip
    sizes = [16384, 16384, 4096, 4096, 2048, 2048, 0, 4096, 4096, 16384, 16384, 0, 0]
    assert [value.bytes for value in graph.values] == sizes
    assert [op.inputs for op in graph.operations] == [
        (), (0,), (1,), (2,), (3,), (4,), (3, 5), (5,), (7,), (1, 8), (0, 9), (10,), (10,),
    ]  # fmt: skip
    # the batch, 8192 bytes, and 288 + 131,328 parameters with gradients: 1036.25 KiB
    assert graph.fixed_bytes == 1036 * 1024
    assert graph.operations[12].cost == 0


def test_hand_computed_alternatives() -> None:
    graph = training_graph(tiny(), "tiny")
    sizes = {value.name: value.bytes for value in graph.values[13:]}
    assert sizes == {"relu_.1:mask": 512, "max_pool2d.2:indices": 1024, "max_pool2d.2:indices_int64": 8192}
    names = [[way.name for way in op.implementations] for op in graph.operations]
    indices = ["indices", "indices_int64"]
    assert names == [
        ["winograd"], ["in_place", "mask", "in_place_mask"], indices, [], [], [], [], [], [], indices,
        ["output", "mask"], ["winograd"], [],
    ]  # fmt: skip
    # 2 images of 4 x 4 tiles, 36 points each: 4 channels in, 8 out, and 32 filters
    winograd = graph.implementation(0, "winograd")
    assert winograd.workspace_bytes == 4 * 36 * (32 * 4 + 32 * 8 + 32) == 59904
    assert winograd.work.flops == 2 * 36 * 32 * 4 * 8 + 14 * 2 * 59904
    ways = ["", "in_place_mask", "indices", *[""] * 6, "indices", "mask", "", ""]
    masked = running(graph, Plan.from_order(graph, range(13), implementations=ways))
    assert masked[:4] == [16384, 16384 + 512, 16384 + 512 + 4096 + 1024, 512 + 1024 + 4096 + 4096]
    assert masked[9:11] == [512 + 1024 + 4096 + 16384, 512 + 16384 + 16384]
    plan = plain_pytorch(graph)
    assert plan.choices == ("", "in_place", "indices_int64", *[""] * 6, "indices_int64", "output", "", "")
    assert running(graph, plan) == [
        16384, 16384, 28672, 32768, 30720, 32768, 30720, 30720, 32768, 45056, 49152, 16384, 16384,
    ]  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_plain_pytorch_needs_about_what_was_measured(name: str) -> None:
    """MONeT's GB are GiB. Ours has no convolution scratch; published runs let cuDNN choose by time, and try all."""
    graph = monet_graph(name)
    peak = simulate(graph, plain_pytorch(graph)).peak_bytes / 2**30
    assert -0.075 < peak / PYTORCH_GIB[name] - 1 < 0.005


def plan_with(graph: Graph, k: int, way: Implementation) -> Plan:
    """Every operation once, `k` in that way, and others as that asks of them."""
    names = [""] * len(graph)
    names[k] = way.name
    first_extra = len(graph.values) - graph.n_extra
    for v in way.inputs:
        if v >= first_extra:
            maker = graph.producer[v]
            names[maker] = next(w.name for w in graph.operations[maker].implementations if v in w.outputs)
    if way.overwrites is not None:
        for user in (u for u in graph.users[way.overwrites] if u > k):
            names[user] = next(
                w.name for w in graph.operations[user].implementations
                if way.overwrites not in w.inputs and max(w.inputs) < first_extra
            )  # fmt: skip
    return Plan.from_order(graph, range(len(graph)), implementations=names)


@pytest.mark.parametrize("name", ["leaky", "unet", "mobilenet_v2", "googlenet"])
def test_ways_of_every_kind_can_be_executed(name: str) -> None:
    graph = with_gist(training_graph(leaky(), name) if name == "leaky" else monet_graph(name, 2), lossy=True)
    seen = Counter[tuple[str, str]]()
    for k, op in enumerate(graph.operations):
        for way in op.implementations:
            seen[op.kind, way.name] += 1
            if seen[op.kind, way.name] <= 3:
                assert simulate(graph, plan_with(graph, k, way)).peak_bytes > graph.fixed_bytes
    expected = {"in_place", "mask", "in_place_mask", "output", "half", *(["activated"] if name == "leaky" else [])}
    assert expected <= {way for _, way in seen}


def test_all_ways_are_weighed_by_any_cost_model() -> None:
    joint, plain = monet_graph("unet", 2), monet_graph("unet", 2, implementations="none")
    for model, gpu in (("roofline", load_gpu("v100")), ("flops", None)):
        weighed = apply_cost(joint, model, gpu)
        assert weighed.default().sha256() == apply_cost(plain, model, gpu).sha256()
    assert apply_cost(joint, "roofline", load_gpu("p100")) == joint
    graph = monet_graph("vgg16")
    convolutions = [k for k, op in enumerate(graph.operations) if op.kind == "aten::_convolution"]
    gains = [graph.operations[k].cost / graph.implementation(k, "winograd").cost for k in convolutions]
    assert gains[0] < 1 < gains[1] < max(gains) < 4  # slower where the transforms weigh more: 3 channels in; 64; 512


def test_gist_by_hand() -> None:
    graph = with_gist(training_graph(tiny(2), "tiny", implementations="none"))
    solution = remat.solve(graph, "1GB", "gist")
    assert solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    assert (solution.parameters["lossy"], solution.plan.n_computations) == (False, len(graph))
    sparse = 5 * 2048 + 4 * (4096 // 256 + 1)
    sizes = {value.name: value.bytes for value in graph.values[-graph.n_extra :]}
    assert sizes == {"relu_.1:sparse": sparse, "relu_.3:mask": 512, "max_pool2d.4:indices": 1024}
    held = running(graph, solution.plan)
    assert held[:5] == [16384, 16384 + sparse, 2 * 16384 + sparse, sparse + 16384 + 512, sparse + 16384 + 512 + 5120]
    assert held[-5:] == [sparse + 2 * 16384] * 3 + [16384] * 2  # decoded for the weights; read as it is by ReLU
    assert solution.peak_bytes == graph.fixed_bytes + sparse + 512 + 2 * 16384


@pytest.mark.parametrize("name", ["mobilenet_v2", "unet", "vgg16"])
def test_gist_saves_memory_and_lossy_more(name: str) -> None:
    graph = with_gist(monet_graph(name, 8), lossy=True)
    plain = simulate(graph, plain_pytorch(graph))
    exact, lossy = (remat.solve(graph, "64GB", "gist", lossy=lossy) for lossy in (False, True))
    assert lossy.peak_bytes <= exact.peak_bytes < plain.peak_bytes
    assert exact.cost > plain.cost
    assert not any(
        graph.implementation(k, w).is_lossy for k, w in zip(exact.plan.order.tolist(), exact.plan.choices, strict=True)
    )
    dense = remat.solve(with_gist(monet_graph(name, 8), 0.0), "64GB", "gist")
    assert dense.peak_bytes > exact.peak_bytes


def test_what_cannot_be_built_or_encoded_is_refused() -> None:
    for name, batch in (("vgg", None), ("vgg16", 0), ("vgg16", True)):
        with pytest.raises(InvalidInput, match=r"vgg16|batch"):
            monet_graph(name, batch)
    with pytest.raises(InvalidInput, match="joint"):
        monet_graph("vgg16", 2, implementations="join")
    graph = monet_graph("vgg16", 2)
    assert with_gist(with_gist(graph)) == with_gist(graph)
    solution = remat.solve(graph, "64GB", "gist")
    assert solution.status is Status.SKIPPED
    assert "with_gist" in solution.message
    with pytest.raises(InvalidInput, match="sparsity"):
        with_gist(graph, math.nan)
    with pytest.raises(InvalidInput, match="no loss"):
        with_gist(Graph.from_nodes("g", [[]], [1], [1]))
