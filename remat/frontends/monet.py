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

Costs of alternatives are modelled: see `add_implementations`, which also explains their names. `load_costs` reads those
that MONeT measured, by the levels of its ablation.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat.cost import apply_cost, load_gpu
from remat.errors import InvalidInput, check_name
from remat.frontends._monet_costs import KEPT_INDICES, STATISTICS, load_costs, load_schedules, read_costs
from remat.frontends._monet_costs import MODES as LEVELS_PUBLISHED
from remat.frontends._monet_gist import with_gist
from remat.frontends._monet_implementations import DEVICE, add_implementations
from remat.frontends.monet_networks import BATCHES, FLOAT_BYTES, NETWORKS, Layer, Network
from remat.graph import Graph, Work

__all__ = [
    "BATCHES", "KEPT_INDICES", "LEVELS_PUBLISHED", "NETWORKS", "STATISTICS", "load_costs", "load_schedules",
    "monet_graph", "read_costs", "training_graph", "with_gist",
]  # fmt: skip

KIB = 1024
_READS_INPUT = ("aten::batch_norm", "aten::relu_", "aten::relu", "aten::leaky_relu_", "aten::max_pool2d")
_READS_OUTPUT = ("aten::hardtanh_", "aten::hardtanh", "aten::dropout")


def monet_graph(name: str, batch: int | None = None, *, implementations: str = "joint") -> Graph:
    """The training graph of one of `NETWORKS`, with costs by the P100's roofline.

    Args:
        batch: None for the published batch.
        implementations: ``none``, or ``joint``: all those of `add_implementations`.

    Raises:
        InvalidInput: no such network or batch, or another word for `implementations`.
    """
    check_name("network", name, NETWORKS)
    batch = BATCHES[name] if batch is None else batch
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise InvalidInput(f"batch must be a positive integer, not {batch!r}")
    return training_graph(NETWORKS[name](batch), f"{name}_b{batch}", implementations=implementations)


def training_graph(network: Network, name: str, *, implementations: str = "joint") -> Graph:
    """The training graph of any `Network`; see `monet_graph`."""
    check_name("choice of implementations", implementations, ("none", "joint"))
    graph = apply_cost(_default(network.layers, name), "roofline", load_gpu(DEVICE))
    return graph if implementations == "none" else add_implementations(graph, network.layers)


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
