"""Synthetic training graphs: linear chains, random layered graphs and U-shaped skip graphs.

They come with costs (`cost_unit` "unit") and no `Work`; no cost model is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec, check_options, load_target
from remat.graph import Graph
from remat.units import parse_seed

COST_UNIT = "unit"
MAX_NODES = 100_000
MAX_BYTES, MAX_COST = 6144, 1000  # of a node of a layered graph
VARIABILITY = 0.75  # widths of its layers are uniform within this share of the mean


def extract(spec: ModelSpec) -> Graph:
    """The graph of ``remat.frontends.synthetic:chain`` (or layered, skip, any factory that returns a Graph).

    Sizes are per sample: `spec.batch_size` multiplies bytes and costs. An `input_size` is refused.

    Raises:
        InvalidInput: an option that cannot be used.
    """
    _check(batch_size=spec.batch_size)
    if spec.input_size:
        raise InvalidInput(f"{spec.name}: synthetic graphs have no input_size; their options are n, depth, seed, ...")
    factory = load_target(spec.target)
    arguments = {"batch_size": spec.batch_size, "name": spec.graph_name, **spec.options}
    check_options(spec, factory, arguments)
    graph = factory(**arguments)
    if not isinstance(graph, Graph):
        raise InvalidInput(f"{spec.name}: {spec.target} returned {type(graph).__name__}, not a remat.Graph")
    return graph


def chain(
    *,
    n: int = 16,
    bytes: int = 1024,
    cost: int = 1,
    varied: bool = False,
    seed: int = 0,
    batch_size: int = 1,
    name: str = "chain",
) -> Graph:
    """A linear network of `n` layers with its loss and mirrored backward pass (2n + 1 operations).

    Args:
        n: number of layers.
        bytes, cost: of each layer's output and forward computation, per sample.
        varied: draw both uniformly from 1 to twice these values.
        seed: of the draw.
    """
    _check(n=n, bytes=bytes, cost=cost, batch_size=batch_size)
    sizes, costs = _weights(n, bytes, cost, varied, seed)
    deps = [[i - 1] if i else [] for i in range(n)]
    return _training(name, deps, sizes, costs, [f"layer{i}" for i in range(n)], batch_size, "linear chain")


def skip(
    *,
    depth: int = 8,
    bytes: int = 1024,
    cost: int = 1,
    varied: bool = False,
    seed: int = 0,
    batch_size: int = 1,
    name: str = "skip",
) -> Graph:
    """A U-shaped network: `depth` layers down and as many up; each layer up also reads its mirror image.

    Args:
        depth: layers on each side; 2 depth + 1 with the bottom layer, 4 depth + 3 with loss and backward.
        bytes, cost: of the outermost layers, per sample; each deeper level has half the bytes, as U-Net's activations.
        varied: draw bytes and costs uniformly from 1 to twice these values.
        seed: of the draw.
    """
    _check(depth=depth, bytes=bytes, cost=cost, batch_size=batch_size)
    n = 2 * depth + 1
    sizes, costs = _weights(n, bytes, cost, varied, seed)
    deps = [[], *([i - 1] if i <= depth else [n - 1 - i, i - 1] for i in range(1, n))]
    sizes = [max(1, size >> min(i, n - 1 - i)) for i, size in enumerate(sizes)]
    names = [f"down{i}" for i in range(depth)] + ["bottom"] + [f"up{i}" for i in reversed(range(depth))]
    return _training(name, deps, sizes, costs, names, batch_size, "U-shaped skip graph")


def layered(
    *,
    n: int = 100,
    width: float = 0.27,
    density: float = 0.2,
    skips: float = 0.14,
    seed: int = 0,
    batch_size: int = 1,
    name: str = "layered",
) -> Graph:
    """A random layered graph like MOCCASIN's (Bartan et al., ICML 2023), without a backward pass.

    One source, layers of about sqrt((n - 2) width) nodes, one sink. Sizes lie between 1 and `MAX_BYTES`, and small ones
    are more likely (the mean is a third); costs are uniform from 0 to `MAX_COST`. The published generator is not
    available; parameters have the meaning that its file names and graphs suggest.

    Args:
        n: nodes, source and sink included.
        width: ratio of mean layer width to number of layers.
        density: probability of an edge between two nodes of consecutive layers. In any case each node gets
            one edge in and at least one edge out.
        skips: edges over more than one layer, as a share of all edges.
        seed: of all random draws.
    """
    _check(n=n, batch_size=batch_size)
    if n < 3:
        raise InvalidInput(f"a layered graph needs n of at least 3 (source, layer, sink), not {n}")
    if width <= 0 or not 0 <= density <= 1 or not 0 <= skips < 1:
        raise InvalidInput("layered: width must be positive, density and skips between 0 and 1")
    random = np.random.default_rng(abs(parse_seed(seed)))
    levels = [[0], *_levels(n - 2, width, random), [n - 1]]
    edges = _edges(levels, density, skips, random)
    deps: list[list[int]] = [[] for _ in range(n)]
    for u, v in edges:
        deps[v].append(u)
    draw = np.minimum(random.uniform(size=n), random.uniform(size=n))
    sizes = (1 + np.floor(draw * MAX_BYTES)).astype(np.int64) * batch_size
    costs = random.integers(0, MAX_COST, size=n, endpoint=True) * batch_size
    return Graph.from_nodes(
        name, deps, sizes.tolist(), costs.tolist(), cost_unit=COST_UNIT, source=f"random layered graph, seed {seed}"
    )


def _levels(n: int, width: float, random: np.random.Generator) -> list[list[int]]:
    """Node ids 1..n in layers of consecutive ids."""
    count = min(max(1, round((n / width) ** 0.5)), n)
    share = np.maximum(1 + VARIABILITY * random.uniform(-1, 1, size=count), 1e-3)
    sizes = np.ones(count, dtype=np.int64)
    # Every layer has one node; each other node goes to the layer with the largest deficit to its drawn width.
    target = share / share.sum() * n
    for _ in range(n - count):
        sizes[int(np.argmax(target - sizes))] += 1
    ends = 1 + np.cumsum(sizes)
    return [list(range(int(end - size), int(end))) for size, end in zip(sizes, ends, strict=True)]


def _edges(
    levels: Sequence[Sequence[int]], density: float, skips: float, random: np.random.Generator
) -> set[tuple[int, int]]:
    edges: set[tuple[int, int]] = set()
    for above, below in pairwise(levels):
        linked = random.uniform(size=(len(above), len(below))) < density
        linked[random.integers(len(above), size=len(below)), np.arange(len(below))] = True
        for i in np.flatnonzero(~linked.any(axis=1)):
            linked[i, random.integers(len(below))] = True
        edges.update((above[i], below[j]) for i, j in np.argwhere(linked).tolist())
    inner = levels[1:-1]
    pairs = sum(len(a) * sum(map(len, inner[k + 2 :])) for k, a in enumerate(inner))
    wanted = min(round(len(edges) * skips / (1 - skips)), pairs)
    level_of = {node: k for k, level in enumerate(levels) for node in level}
    first, last = inner[0][0], inner[-1][-1]
    added: set[tuple[int, int]] = set()
    while len(added) < wanted:
        u, v = sorted(random.integers(first, last, size=2, endpoint=True).tolist())
        if level_of[v] - level_of[u] > 1:
            added.add((u, v))
    return edges | added


def _weights(n: int, size: int, cost: int, varied: bool, seed: int) -> tuple[list[int], list[int]]:
    if not varied:
        return [size] * n, [cost] * n
    random = np.random.default_rng(abs(parse_seed(seed)))
    sizes = random.integers(1, 2 * size, size=n, endpoint=True)
    costs = random.integers(1, max(1, 2 * cost), size=n, endpoint=True)
    return sizes.tolist(), costs.tolist()


def _training(
    name: str,
    forward_deps: Sequence[Sequence[int]],
    sizes: Sequence[int],
    costs: Sequence[int],
    names: Sequence[str],
    batch_size: int,
    what: str,
) -> Graph:
    """The forward graph, a loss on its last node, and mirrored gradients as in Checkmate's layer graphs."""
    n = len(forward_deps)
    users: list[list[int]] = [[] for _ in range(n)]
    for v, dep in enumerate(forward_deps):
        for u in dep:
            users[u].append(v)
    deps = [list(dep) for dep in forward_deps] + [[n - 1]]
    # Operation 2n - i is the gradient of layer i.
    deps += [[i, *users[i], *(2 * n - u for u in users[i]), *([n] if i == n - 1 else [])] for i in reversed(range(n))]
    sizes, costs = [s * batch_size for s in sizes], [c * batch_size for c in costs]
    return Graph.from_nodes(
        name,
        deps,
        [*sizes, 4 * batch_size, *reversed(sizes)],
        [*costs, 0, *(2 * c for c in reversed(costs))],
        names=[*names, "Loss", *(f"{label}_backward" for label in reversed(names))],
        kinds=["Layer"] * n + ["Loss"] + ["LayerGrad"] * n,
        backward=[False] * (n + 1) + [True] * n,
        cost_unit=COST_UNIT,
        loss=n,
        source=f"synthetic {what}",
    )


def _check(**numbers: int) -> None:
    for key, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0 or (number == 0 and "cost" not in key):
            raise InvalidInput(f"{key} must be a positive integer, not {number!r}")
        if key in ("n", "depth") and number > MAX_NODES:
            raise InvalidInput(f"{key} is {number}; the limit is {MAX_NODES}")
