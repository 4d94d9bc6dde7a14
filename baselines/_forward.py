"""The forward pass that the checkpointing baselines work on, and the part of it that each stage belongs to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat import Graph, Skip


@dataclass(frozen=True, slots=True)
class Forward:
    """The forward part of a training graph, linearised in the graph's order (F operations).

    Attributes:
        graph: the whole training graph.
        region: operations of the forward pass, ascending, the loss included.
        operations: [F] the operations of `region` that may be recomputed (all but run-once operations).
        position: [N] index into `operations`; -1 for every other operation.
        anchor: [N] for operations after the forward pass the forward position whose gradient is being computed;
            it never rises from one operation to the next. -1 for all others, and once nothing of the forward
            pass is read any more.
    """

    graph: Graph
    region: tuple[int, ...]
    operations: tuple[int, ...]
    position: np.ndarray
    anchor: np.ndarray

    @classmethod
    def of(cls, graph: Graph) -> Forward:
        """Split `graph` into forward and backward.

        Raises:
            Skip: the graph has no backward pass, or nothing in its forward pass may be recomputed.
        """
        last = len(graph) - 1 if graph.loss is None else graph.loss
        region = tuple(k for k, op in enumerate(graph.operations) if not op.is_backward and k <= last)
        later = sorted(set(range(len(graph))) - set(region))
        if not later:
            raise Skip("needs a training graph with forward and backward operations; this one has no backward")
        operations = tuple(k for k in region if not graph.operations[k].run_once)
        if not operations:
            raise Skip("no operation of the forward pass may be recomputed")
        position = np.full(len(graph), -1)
        position[list(operations)] = np.arange(len(operations))
        return cls(graph, region, operations, position, _anchors(graph, position, later))

    @property
    def is_chain(self) -> bool:
        """Whether each forward operation reads the one before it and nothing else of the forward pass."""
        graph = self.graph
        pairs = zip(self.operations, (None, *self.operations), strict=False)
        return self.region == self.operations and all(
            graph.predecessors(k) == (() if before is None else (before,)) for k, before in pairs
        )

    def is_update(self, k: int) -> bool:
        """Whether operation `k` belongs to neither pass or must run exactly once, like a state update."""
        op = self.graph.operations[k]
        return op.run_once or (k > self.region[-1] and not op.is_backward)

    def bytes_at(self, position: int) -> int:
        """Bytes of the outputs of the forward operation at `position`."""
        graph = self.graph
        return sum(graph.values[v].bytes for v in graph.operations[self.operations[position]].outputs)

    def articulation_points(self) -> list[int]:
        """Positions of the operations that separate the network's input from its loss, ascending.

        These are the articulation points of the undirected forward graph between its first and its last
        operation. The two ends are not among them, because removing an end separates nothing. Linear in the
        graph's size (Hopcroft and Tarjan 1973).

        Raises:
            Skip: there are none.
        """
        separators = _separators(self.graph, self.region)
        points = [int(self.position[k]) for k in separators if self.position[k] >= 0]
        if not points:
            raise Skip("the forward pass has no articulation points")
        return points


def _anchors(graph: Graph, position: np.ndarray, later: list[int]) -> np.ndarray:
    """[N] suffix maximum of the earliest forward position that each later operation reads.

    In a mirrored layer graph grad(x) reads out(x) and the outputs of its users; its anchor is x. Without the
    maximum one value that is read all the time (a mask, say) would hide the order.
    """
    anchor = np.full(len(graph), -1)
    highest = -1
    for k in reversed(later):
        read = [position[graph.producer[v]] for v in graph.operations[k].inputs]
        highest = max(highest, min((p for p in read if p >= 0), default=-1))
        anchor[k] = highest
    return anchor


def _separators(graph: Graph, region: tuple[int, ...]) -> list[int]:
    """Operations of `region` on every undirected path from its first operation to its last, ascending.

    The first operation is the earliest one that is connected to the last. Neither end is returned.
    """
    inside = set(region)
    neighbours: dict[int, list[int]] = {k: [] for k in region}
    for k in region:
        for p in graph.predecessors(k):
            if p in inside:
                neighbours[k].append(p)
                neighbours[p].append(k)
    last = region[-1]
    # Depth-first from the last operation: v separates `first` from it iff v is an ancestor of `first` and the
    # subtree towards `first` reaches no higher than v.
    entered, lowest, parent = {last: 0}, {last: 0}, {last: -1}
    stack = [(last, iter(neighbours[last]))]
    while stack:
        k, remaining = stack[-1]
        for other in remaining:
            if other not in entered:
                entered[other] = lowest[other] = len(entered)
                parent[other] = k
                stack.append((other, iter(neighbours[other])))
                break
            if other != parent[k]:
                lowest[k] = min(lowest[k], entered[other])
        else:
            stack.pop()
            if parent[k] >= 0:
                lowest[parent[k]] = min(lowest[parent[k]], lowest[k])
    found, k = [], min(entered)
    while k != last:
        above = parent[k]
        if above != last and lowest[k] >= entered[above]:
            found.append(above)
        k = above
    return sorted(found)
