"""Rotor: the optimal persistent checkpoints of a chain of stages, by dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baselines._forward import Forward
from baselines._persistent import Stages, cheapest_schedule
from remat import Candidate, Graph, Plan, Problem, simulate, strategy

MOST_STAGES = 200  # the program takes time in the cube of their number
TRIES = 6  # of smaller limits, until the simulator agrees


@strategy("rotor", baseline=True)
def rotor(problem: Problem, *, slots: int = 500) -> list[Candidate]:
    """The cheapest schedule whose checkpoints stay until they are used (Beaumont et al., 2019).

    Each stage of the chain runs forward without saving, or saves its input, or saves all that its backward pass reads.
    The program is exact on a chain whose bytes are multiples of a slot (`baselines._persistent`). As its authors do,
    another graph is taken as the sequence of what lies between its articulation points.

    Deviations: gradients of parameters count from where they are made. Of more than 200 articulation points those with
    most bytes are left out. The simulator frees each value at its last use, and judges; where values are read across
    stages, the program is asked again with a smaller limit.

    Args:
        slots: into which the memory is divided; their published setting is 500.

    @article{beaumont2019optimal, title={Optimal checkpointing for heterogeneous chains: how to train deep neural
    networks with limited memory}, author={Beaumont, Olivier and Eyraud-Dubois, Lionel and Herrmann, Julien and Joly,
    Alexis and Shilova, Alena}, journal={arXiv:1911.13214}, year={2019}}
    """
    chain = _Chain.of(problem.graph)
    stages = chain.stages()
    room = problem.budget_bytes - problem.graph.fixed_bytes
    for _ in range(TRIES):
        if room <= 0:
            break
        unit = -(-room // slots)
        passes = cheapest_schedule(stages.in_slots(unit), room // unit)
        if passes is None:
            break
        plan = Plan.from_order(problem.graph, chain.order(passes))
        excess = simulate(problem.graph, plan).peak_bytes - problem.budget_bytes
        if excess <= 0:
            return [Candidate(plan, {"stages": len(chain.forward)})]
        room -= max(excess, unit)
    return []


@dataclass(frozen=True, slots=True)
class _Chain:
    """Stages of a graph: forward and backward operations of each.

    Attributes:
        forward, backward: [L] operations, ascending.
    """

    graph: Graph
    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]

    @classmethod
    def of(cls, graph: Graph) -> _Chain:
        forward = Forward.of(graph)
        points = range(len(forward.operations) - 1) if forward.is_chain else forward.articulation_points()
        cuts = sorted(sorted(points, key=forward.bytes_at)[: MOST_STAGES - 1])
        ends = [forward.operations[p] for p in cuts]
        stage_of = np.searchsorted(ends, np.arange(len(graph)))  # a stage ends with its articulation point
        runs: list[list[int]] = [[] for _ in range(len(ends) + 1)]
        returns: list[list[int]] = [[] for _ in range(len(ends) + 1)]
        inside = set(forward.region)
        for k in range(len(graph)):
            if k in inside:
                runs[stage_of[k]].append(k)
            else:
                anchor = int(forward.anchor[k])
                returns[stage_of[forward.operations[anchor]] if anchor >= 0 else 0].append(k)
        return cls(graph, runs, returns)

    def order(self, passes: Sequence[tuple[str, int]]) -> list[int]:
        """Operations of passes; what must run once runs the first time."""
        order, known = list[int](), set[int]()
        for kind, stage in passes:
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
