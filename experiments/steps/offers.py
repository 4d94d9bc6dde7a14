"""The offers of implementations to a model's graph, and the bytes held where they could run."""

import collections
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import remat
from remat.graph import Graph
from remat.implementation import DEFAULT, Implementation


def held_by_those_who_offer(graph: Graph, plan: remat.Plan) -> dict[str, float]:
    """[implementation] the most bytes held while an operation that has it runs, as a share of the plan's peak."""
    trace = remat.simulate(graph, plan)
    most = np.zeros(len(graph), dtype=np.int64)
    np.maximum.at(most, trace.order, trace.running_bytes)
    held: dict[str, float] = collections.defaultdict(float)
    for k, op in enumerate(graph.operations):
        for implementation in op.implementations:
            held[implementation.name] = max(held[implementation.name], float(most[k]) / trace.peak_bytes)
    return dict(held)


@dataclass(frozen=True, slots=True)
class Offer:
    """The offer of an implementation to a model, by measured costs and counted bytes.

    Attributes:
        operations: number of operations that have it; a forward and its backward operation are two.
        offers: number of independent choices: a backward operation that needs an extra output of its forward operation
            is one choice with it.
        needed_later: number of choices that would overwrite a value which another operation reads by default.
        worse_than: [other implementation of the same operations] number of the remaining choices that it beats: it is
            not slower, keeps no more bytes for the backward pass and needs no more while it runs.
        slower: median, over the choices left, of their time over the default's, minus 1; 0 if none is left.
        spares_kept_bytes: of the choices left, the most that one spares of the bytes that the backward pass reads.
        spares_running_bytes: likewise of the bytes that an operation needs while it runs.
    """

    operations: int
    offers: int
    needed_later: int
    worse_than: dict[str, int]
    slower: float
    spares_kept_bytes: int
    spares_running_bytes: int


def offered(graph: Graph) -> dict[str, dict[str, Any]]:
    """`Offer` of each implementation by name, as JSON."""
    by_name: dict[str, list[_Choice]] = collections.defaultdict(list)
    rivals: dict[tuple[int, ...], list[_Choice]] = collections.defaultdict(list)
    for choice in _choices(graph):
        by_name[choice.name].append(choice)
        rivals[choice.operations].append(choice)
    return {name: asdict(_offer(mine, rivals, graph)) for name, mine in sorted(by_name.items())}


@dataclass(frozen=True, slots=True)
class _Choice:
    """Operations that run by one implementation, against their default ones; bytes are above the default's."""

    name: str
    operations: tuple[int, ...]
    implementations: tuple[Implementation, ...]
    ns: int
    default_ns: int
    kept_bytes: int
    running_bytes: tuple[int, ...]

    def no_better_than(self, other: "_Choice") -> bool:
        """Whether `other`, for the same operations, is as good in everything; of equals only the default counts."""
        running = zip(self.running_bytes, other.running_bytes, strict=True)
        same = (self.ns, self.kept_bytes, self.running_bytes) == (other.ns, other.kept_bytes, other.running_bytes)
        no_better = self.ns >= other.ns and self.kept_bytes >= other.kept_bytes and all(a >= b for a, b in running)
        return no_better and (other.name == DEFAULT or not same)

    def default(self) -> "_Choice":
        """The default implementations of the same operations."""
        return _Choice(DEFAULT, self.operations, (), self.default_ns, self.default_ns, 0, (0,) * len(self.operations))


def _offer(mine: list[_Choice], rivals: dict[tuple[int, ...], list[_Choice]], graph: Graph) -> Offer:
    needed, left = 0, []
    worse: collections.Counter[str] = collections.Counter()
    for choice in mine:
        both = zip(choice.operations, choice.implementations, strict=True)
        if any(one.overwrites is not None and any(user > k for user in graph.users[one.overwrites]) for k, one in both):
            needed += 1  # it overwrites what is read
            continue
        others = (choice.default(), *rivals[choice.operations])
        better = next((other for other in others if choice.no_better_than(other)), None)
        if better is None:
            left.append(choice)
        else:
            worse[better.name] += 1
    return Offer(
        operations=sum(len(choice.operations) for choice in mine), offers=len(mine), needed_later=needed,
        worse_than=dict(worse.most_common()),
        slower=statistics.median([c.ns / max(1, c.default_ns) - 1 for c in left]) if left else 0.0,
        spares_kept_bytes=max((-c.kept_bytes for c in left), default=0),
        spares_running_bytes=max((-min(c.running_bytes) for c in left), default=0),
    )  # fmt: skip


def _choices(graph: Graph) -> Iterator[_Choice]:
    """Every implementation of every operation, with the forward implementations that make its extra inputs."""
    first_extra = len(graph.values) - graph.n_extra
    readers: dict[int, set[int]] = collections.defaultdict(set)  # [value] backward operations that read it by default
    for k, op in enumerate(graph.operations):
        for v in op.inputs if op.is_backward else ():
            readers[v].add(k)
    makers_of = {
        (k, implementation.name): sorted({graph.producer[v] for v in implementation.inputs if v >= first_extra})
        for k, op in enumerate(graph.operations) for implementation in op.implementations
    }  # fmt: skip
    forward = {(k, name) for (_, name), makers in makers_of.items() for k in makers}
    for (k, name), makers in makers_of.items():
        if (k, name) in forward:
            continue  # it comes with the operation that reads its extra output
        own = graph.implementation(k, name)
        operations = (*makers, k)
        implementations = (*(_maker(graph, m, own) for m in makers), own)
        defaults = tuple(graph.implementation(m, DEFAULT) for m in operations)
        yield _Choice(
            name, operations, implementations, sum(one.cost for one in implementations),
            sum(one.cost for one in defaults),
            _only_read_by(graph, operations, implementations, readers)
            - _only_read_by(graph, operations, defaults, readers),
            tuple(graph.touched_bytes(a) - graph.touched_bytes(b)
                  for a, b in zip(implementations, defaults, strict=True)),
        )  # fmt: skip


def _maker(graph: Graph, k: int, reader: Implementation) -> Implementation:
    """The implementation of operation `k` with the reader's name, or else one that makes an input of the reader."""
    implementations = graph.operations[k].implementations
    named = [one for one in implementations if one.name == reader.name]
    return (named or [one for one in implementations if {*one.outputs} & {*reader.inputs}])[0]


def _only_read_by(
    graph: Graph, operations: Iterable[int], implementations: Iterable[Implementation], readers: dict[int, set[int]]
) -> int:
    """Bytes of the forward pass that the backward pass reads in these operations and nowhere else."""
    inputs = {
        v for k, one in zip(operations, implementations, strict=True) if graph.operations[k].is_backward
        for v in one.inputs if not graph.operations[graph.producer[v]].is_backward
    }  # fmt: skip
    return sum(graph.values[v].bytes for v in inputs if not readers[v] - {*operations})
