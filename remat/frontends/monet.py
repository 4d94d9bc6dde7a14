"""Training graphs of MONeT (Shah et al., ICLR 2021, arXiv 2010.14501): five networks with implementations.

With ``implementations="none"`` the graphs of ResNet50, U-Net and VGG16 are those published with monet-schedules: same
kinds, bytes and edges. They follow from these rules, all checked against the published graphs:

- Backward operations come in reverse order. A convolution or matrix product has two, ``_param_grad`` of 0 bytes and
  then ``_ip_grad``; a depthwise convolution has one for both. The input batch needs no gradient: 0 bytes, no cost.
- An operation's gradient has the bytes of all of its inputs together (``add_``, ``cat``), and each reader reads
  all of it. The backward of an activation with several readers reads all of their gradients: adding up is free.
- In the backward pass ``_param_grad`` of convolutions and products, ReLU, batch normalization and max pooling read
  their input; ``hardtanh_`` and ``dropout`` their output; ``add``, ``cat``, ``flatten`` and average pooling neither.
- Every value, and `fixed_bytes`, is rounded to the nearest KiB (half to even).
- `fixed_bytes` is the input batch, parameters, running statistics and a gradient for every parameter, which counts
  from the beginning although the backward pass makes it. It holds nothing of an optimizer.

The same rules apply to networks without a published profile (GoogLeNet, MobileNetV2). GoogLeNet's loss also reads
the logits of both auxiliary heads.

Costs of alternatives are modelled: see `add_implementations`, which also explains their names.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.cost import apply_cost, load_gpu
from remat.cost.gpu import Gpu
from remat.errors import InvalidInput, unknown_name
from remat.frontends._monet_costs import KEPT_INDICES, STATISTICS, load_costs, read_costs
from remat.frontends._monet_costs import MODES as LEVELS_PUBLISHED
from remat.frontends._monet_gist import ASSUMED_SPARSITY, with_gist
from remat.frontends._monet_implementations import LEVELS, add_implementations
from remat.frontends._monet_records import load_schedules
from remat.frontends.monet_networks import BATCHES, FLOAT_BYTES, NETWORKS, Layer, Network
from remat.graph import Graph, Work
from remat.plan import Plan

__all__ = [
    "BATCHES", "KEPT_INDICES", "LEVELS", "LEVELS_PUBLISHED", "NETWORKS", "STATISTICS", "load_costs", "load_schedules",
    "monet_graph", "plain_pytorch", "read_costs", "training_graph", "with_gist",
]  # fmt: skip

KIB = 1024
_READS_INPUT = ("aten::batch_norm", "aten::relu_", "aten::relu", "aten::leaky_relu_", "aten::max_pool2d")
_READS_OUTPUT = ("aten::hardtanh_", "aten::hardtanh", "aten::dropout")
_PLAIN_FORWARD = ("in_place", "indices_int64")
_PLAIN_BACKWARD = ("output", "indices_int64")


def monet_graph(
    name: str,
    batch: int | None = None,
    *,
    implementations: str = "joint",
    profile: Graph | None = None,
    gpu: str | Gpu = "p100",
    gist: bool = False,
    sparsity: float = ASSUMED_SPARSITY,
) -> Graph:
    """The training graph of one of `NETWORKS`.

    Args:
        batch: None for the published batch.
        implementations: a level of MONeT's ablation, each of which includes the levels before it: ``none``,
            ``in_place``, ``conv``, ``output``, ``intermediate``; ``joint`` is all.
        profile: the published graph of that network and batch (`remat.load_graph` reads instances/p100). Default
            implementations then have its measured costs. The cost of an alternative is modelled: that of its default
            times the ratio of their roofline times on `gpu`.
        gpu: a device of `remat.cost.gpu_names()`, whose roofline gives the costs without a profile.
        gist: add the implementations for the strategy ``gist`` (`with_gist`), at that `sparsity`.

    Raises:
        InvalidInput: unknown network or level, or a profile of another graph.
    """
    if name not in NETWORKS:
        raise unknown_name("network", name, NETWORKS)
    batch = BATCHES[name] if batch is None else batch
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InvalidInput(f"batch must be a positive integer, not {batch!r}")
    graph = training_graph(
        NETWORKS[name](batch), f"{name}_b{batch}", implementations=implementations, profile=profile, gpu=gpu
    )  # fmt: skip
    return with_gist(graph, sparsity, gpu=gpu) if gist else graph


def training_graph(
    network: Network, name: str, *, implementations: str = "joint", profile: Graph | None = None,
    gpu: str | Gpu = "p100",
) -> Graph:  # fmt: skip
    """The training graph of any `Network`; see `monet_graph`."""
    level = LEVELS[-1] if implementations == "joint" else implementations
    if level not in LEVELS:
        raise unknown_name("level of implementations", implementations, ("joint", *LEVELS))
    device = load_gpu(gpu) if isinstance(gpu, str) else gpu
    graph = apply_cost(_default(network.layers, name), "roofline", device)
    if profile is not None:
        _check_same(graph, profile)
        graph = graph.with_costs([op.cost for op in profile.operations], profile.cost_unit)
    return add_implementations(graph, network.layers, level, device)


def plain_pytorch(graph: Graph) -> Plan:
    """The plan that PyTorch executes by default: activations in place, everything else kept.

    ReLU and ``add_`` overwrite their input, ReLU's backward reads its output, max pooling keeps int64 indices, and
    convolutions run by their default. Unlike PyTorch, the published graphs copy the gradients of ``add``, ``cat`` and
    ``flatten`` instead of viewing them, and dropout's backward reads its output instead of a mask.

    Raises:
        InvalidInput: the graph lacks these implementations, which ``monet_graph(name)`` has.
    """
    names = {implementation.name for op in graph.operations for implementation in op.implementations}
    if "in_place" not in names or "output" not in names:
        raise InvalidInput(
            f"graph '{graph.name}' has no implementations in place and none that read outputs; plain PyTorch needs a "
            "graph of remat.frontends.monet.monet_graph(..., implementations='joint')"
        )
    chosen = []
    for op in graph.operations:
        wanted = _PLAIN_BACKWARD if op.is_backward else _PLAIN_FORWARD
        if op.kind in ("aten::dropout", "aten::batch_norm_ip_grad"):
            wanted = ()
        chosen.append(
            next((implementation.name for implementation in op.implementations if implementation.name in wanted), "")
        )
    return Plan.from_order(graph, range(len(graph)), implementations=chosen)


def _default(layers: Sequence[Layer], name: str) -> Graph:
    """Default implementations without costs; value i is the output of operation i, layer k is operation k - 1."""
    last = len(layers) - 1
    readers: list[list[int]] = [[] for _ in layers]
    deps: list[list[int]] = []
    kinds, sizes, works = [], [], []
    for k, layer in enumerate(layers[1:], start=1):
        for i in layer.inputs:
            readers[i].append(k)
        deps.append([i - 1 for i in layer.inputs if i])
        kinds.append(layer.kind)
        sizes.append(layer.bytes)
        moved = sum(layers[i].bytes for i in layer.inputs) + layer.bytes + layer.weight_bytes + layer.saved_bytes
        works.append(Work(layer.flops, moved, is_free=_is_view(layer)))
    loss, ends = last, [k for k in range(1, last + 1) if not readers[k]]
    deps.append([k - 1 for k in ends])
    kinds.append("loss::loss")
    sizes.append(sum(layers[k].bytes for k in ends))
    works.append(Work(0, 2 * sizes[-1]))
    # layer k -> operation that makes the gradient of its output, for ends; -k -> the one that makes that of its inputs
    gradient = dict.fromkeys(ends, loss)
    for k in range(last, 0, -1):
        layer = layers[k]
        of_output = [gradient[k]] if k in gradient else [gradient[-reader] for reader in readers[k]]
        input_bytes = sum(layers[i].bytes for i in layer.inputs if i)
        forward = [i - 1 for i in layer.inputs if i]
        if layer.has_two_gradients:
            deps.append([*forward, *of_output])
            kinds.append(f"{layer.kind}_param_grad")
            sizes.append(0)
        gradient[-k] = len(deps)
        if layer.has_two_gradients or not (layer.kind == "aten::_convolution" or layer.kind in _READS_INPUT):
            forward = [k - 1] if layer.kind in _READS_OUTPUT else []
        deps.append([*forward, *of_output])
        kinds.append(f"{layer.kind}_ip_grad")
        sizes.append(input_bytes)
        works += _gradient_work(layer, [layers[i].bytes for i in layer.inputs])
    parameters = sum(layer.parameters for layer in layers)
    buffers = sum(layer.buffers for layer in layers)
    return Graph.from_nodes(
        name, deps, list(map(_nearest_kib, sizes)), [0] * len(deps),
        names=[f"{kind.split('::')[1]}.{i}" for i, kind in enumerate(kinds)], kinds=kinds,
        backward=[i > loss for i in range(len(deps))], works=works, loss=loss,
        fixed_bytes=_nearest_kib(layers[0].bytes + FLOAT_BYTES * (2 * parameters + buffers)),
        source="layers of the network; form of the training graphs published with monet-schedules",
    )  # fmt: skip


def _gradient_work(layer: Layer, input_bytes: Sequence[int]) -> list[Work]:
    """The work of a layer's backward operations; each moves every tensor that it touches once."""
    of_inputs = sum(input_bytes)
    if layer.weight_bytes:
        moved = of_inputs + layer.bytes + layer.weight_bytes  # for either gradient
        if layer.has_two_gradients:
            return [Work(layer.flops, moved), Work(layer.flops, moved, is_free=layer.inputs == (0,))]
        return [Work(2 * layer.flops, 2 * moved)]
    saved = of_inputs if layer.kind in _READS_INPUT else layer.bytes if layer.kind in _READS_OUTPUT[:2] else 0
    return [Work(layer.flops, layer.bytes + saved + layer.saved_bytes + of_inputs, is_free=_is_view(layer))]


def _is_view(layer: Layer) -> bool:
    return layer.kind == "aten::flatten"


def _nearest_kib(size: int) -> int:
    whole, rest = divmod(size, KIB)
    return KIB * (whole + (rest > KIB // 2 or (rest == KIB // 2 and whole % 2)))


def _check_same(graph: Graph, profile: Graph) -> None:
    """Raise `InvalidInput`, naming the first difference, if `profile` has other kinds, bytes or edges."""
    n = len(graph)
    if len(profile) != n:
        raise InvalidInput(f"profile '{profile.name}' has {len(profile)} operations, but '{graph.name}' has {n}")
    for k, (own, other) in enumerate(zip(graph.operations, profile.operations, strict=True)):
        sizes = graph.values[k].bytes, profile.values[k].bytes
        if (own.kind, own.inputs, own.outputs, sizes[0]) != (other.kind, other.inputs, other.outputs, sizes[1]):
            raise InvalidInput(
                f"profile '{profile.name}' is of another graph than '{graph.name}': operation {k} is {other.kind} of "
                f"{sizes[1]} bytes that reads {list(other.inputs)}, not {own.kind} of {sizes[0]} bytes that reads "
                f"{list(own.inputs)}"
            )
