"""A training graph as a chain of stages: what lies between its articulation points, with its backward operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from baselines._forward import Forward
from baselines._persistent import Stages
from remat import Graph, Skip

SLOTS = range(1, 10_001)  # memory is divided into so many; the program takes memory in proportion


@dataclass(frozen=True, slots=True)
class Chain:
    """Stages of a graph: forward and backward operations of each.

    Attributes:
        forward, backward: [L] operations, ascending.
    """

    graph: Graph
    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]

    @classmethod
    def of(cls, graph: Graph, most_stages: int) -> Chain:
        """Stages that end with an articulation point; beyond the most, points with the most bytes are left out.

        Raises:
            Skip: the graph has no backward pass or no articulation points, or as `cut`.
        """
        forward = Forward.of(graph)
        points = range(len(forward.operations) - 1) if forward.is_chain else forward.articulation_points()
        cuts = sorted(sorted(points, key=forward.bytes_at)[: most_stages - 1])
        return cls.cut(forward, [forward.operations[p] for p in cuts])

    @classmethod
    def cut(cls, forward: Forward, ends: Sequence[int]) -> Chain:
        """Stages that end with these forward operations, which ascend.

        Raises:
            Skip: the forward pass reads what the backward pass makes.
        """
        graph, inside = forward.graph, set(forward.region)
        if any(graph.producer[v] not in inside for k in inside for v in graph.operations[k].inputs):
            raise Skip("a forward operation reads what a backward one made")
        stage_of = np.searchsorted(ends, np.arange(len(graph)))
        runs: list[list[int]] = [[] for _ in range(len(ends) + 1)]
        returns: list[list[int]] = [[] for _ in range(len(ends) + 1)]
        for k in range(len(graph)):
            if k in inside:
                runs[stage_of[k]].append(k)
            else:
                anchor = int(forward.anchor[k])
                returns[stage_of[forward.operations[anchor]] if anchor >= 0 else 0].append(k)
        return cls(graph, runs, returns)

    def grouped(self, size: int) -> Chain:
        """The chain with each `size` neighbours as one stage."""
        starts = range(0, len(self.forward), size)
        passes = (self.forward, self.backward)
        return Chain(self.graph, *([sorted(chain.from_iterable(ops[i : i + size])) for i in starts] for ops in passes))

    def order(self, passes: Sequence[tuple[str, int, int]]) -> list[int]:
        """Operations of passes; what must run once runs the first time."""
        order, known = list[int](), set[int]()
        for kind, stage, _ in passes:
            for k in self.backward[stage] if kind == "return" else self.forward[stage]:
                if not (k in known and self.graph.operations[k].run_once):
                    order.append(k)
            known.update(self.forward[stage])
        return order

    def stages(self) -> Stages:
        """Costs, and sizes in bytes."""
        graph, n = self.graph, len(self.forward)
        stage = {k: i for i, ops in enumerate(self.forward) for k in ops}
        back = {k: i for i, ops in enumerate(self.backward) for k in ops}
        size = [value.bytes for value in graph.values]
        inputs, saved, kept, gradients = (np.zeros(n + 1, dtype=np.int64) for _ in range(4))
        for v, p in enumerate(graph.producer):
            users = graph.users[v]
            if p in stage:
                i = stage[p]
                if any(stage.get(u, i) > i for u in users):
                    inputs[i + 1] += size[v]
                if graph.values[v].keep or any(stage.get(u) != i for u in users):
                    saved[i] += size[v]
            else:
                i = back[p]
                if graph.values[v].keep:
                    kept[: i + 1] += size[v]
                else:
                    lowest = min((back[u] for u in users if u in back), default=i)
                    gradients[lowest + 1 : i + 1] += size[v]
        sizes = [inputs[:n], saved[:n], gradients, kept, *(self._most(which) for which in ("save", "run", "return"))]
        return Stages(
            np.array([sum(graph.operations[k].cost for k in ops) for ops in self.forward]),
            np.array([sum(graph.operations[k].cost for k in ops) for ops in self.backward]),
            *sizes,
        )  # fmt: skip

    def _most(self, which: str) -> np.ndarray:
        """[L] most bytes of its own values, and of those a backward pass reads, in a pass of each stage."""
        passes = self.backward if which == "return" else self.forward
        return np.array([self._most_of(i, ops, which) for i, ops in enumerate(passes)], dtype=np.int64)

    def _most_of(self, stage: int, ops: Sequence[int], which: str) -> int:
        graph, mine = self.graph, set(ops)
        made = {v for k in ops for v in graph.operations[k].outputs}
        own = set(self.forward[stage])
        held = set[int]()
        if which == "return":  # what the forward pass saved, and the gradients that come in
            saved = {v for k in own for v in graph.operations[k].outputs if any(u not in own for u in graph.users[v])}
            held = saved | {v for k in ops for v in graph.operations[k].inputs if graph.producer[v] not in own} - made
        last = {v: max((u for u in graph.users[v] if u in mine), default=-1) for v in made | held}
        if which == "run":  # without saving: only what the next stage reads stays
            later = {k for after in self.forward[stage + 1 : stage + 2] for k in after}
            stays = {v for v in made if any(u in later for u in graph.users[v])}
        else:
            stays = {v for v in made if graph.values[v].keep or any(u not in mine for u in graph.users[v])}
        most = 0
        for k in ops:
            op = graph.operations[k]
            held |= set(op.outputs)
            most = max(most, sum(graph.values[v].bytes for v in held) + op.workspace_bytes)
            held -= {v for v in held if last[v] <= k and v not in stays}
        return most
