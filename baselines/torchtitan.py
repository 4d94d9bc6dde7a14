"""A linear program shares memory among blocks; each keeps, copies and rebuilds by a ranking (torchtitan)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from baselines._offload import Activations, required_link, search_of
from baselines._segments import blocks_of
from remat import Candidate, Plan, Problem, simulate, strategy
from remat.context import Context

LEAST_BYTES = 2**20  # smaller values are not copied
TARGETS, MOST_TARGET = 64, 2.0  # budgets of the program, as shares of the budget: it only estimates peaks


@strategy("torchtitan", baseline=True, copies="own")
def torchtitan(problem: Problem, context: Context) -> Iterator[Candidate]:
    """Keep, copy or rebuild shares of each block by a linear program, then values by cost per byte.

    The rules of torchtitan's planner (pull requests 3942, 3975 and 4636, 2026; its greedy second level). Copies must
    hide in the time of their block, the last block copies nothing, and a block that copies needs room for it while its
    neighbour runs. In a block, values that cost most per byte are copied and those that cost least are rebuilt. What
    the next block reads stays. Deviations: blocks are those that repeat in the graph; bytes that belong to no block
    are those of the plain step; the program gets the largest budget with which the plan fits.
    """
    blocks = _Blocks(problem)

    def target(n: int) -> float:
        return MOST_TARGET * (1 - n / TARGETS)

    def fits(n: int) -> bool:
        shares = None if context.is_over() else blocks.shares(problem.budget_bytes * target(n))
        return shares is None or (blocks.load(shares) and not blocks.search.excess())

    n = bisect_left(range(TARGETS), True, key=fits)
    shares = None if n == TARGETS or context.is_over() else blocks.shares(problem.budget_bytes * target(n))
    if shares is not None and blocks.load(shares):
        yield Candidate(blocks.search.plan(), {"target": target(n)})


class _Blocks:
    """Activations by block (L blocks), and what else is held; arrays have one entry for each block.

    Attributes:
        activations: [L] values made in each block that the backward pass reads; bytes: [L] theirs.
        held: [value] what a block reads of what was before it, and up to which operation it stays for the rebuilding.
        kept: [L] bytes of these that each block made, as shares of those of its activations.
        forward_ns, backward_ns: time of a block, by which its copies must be over.
        rest_forward, rest_backward: most bytes beside the blocks' activations while each runs; rest: elsewhere.
    """

    def __init__(self, problem: Problem):
        graph = self.graph = problem.graph
        self.link, self.search, self.of = required_link(problem), search_of(problem), Activations.of(problem)
        blocks, forward = blocks_of(graph), self.of.forward
        block_of = {k: i for i, block in enumerate(blocks) for k in block}
        number = {v: block_of[graph.producer[v]] for v in self.of.last if graph.producer[v] in block_of}
        self.activations = [[v for v in number if number[v] == i] for i in range(len(blocks))]
        self.bytes = np.array([sum(graph.values[v].bytes for v in values) for values in self.activations], float)
        end = forward.region[-1]
        until = [max((self.of.first[v] for v in values), default=end) for values in self.activations]
        self.held = {
            v: max(until[i] for i in readers) for v, k in enumerate(graph.producer) if k <= end
            for readers in [{block_of[u] for u in graph.users[v] if u in block_of} - {block_of.get(k)}] if readers
        }  # fmt: skip
        owned = [sum(graph.values[v].bytes for v in self.held if graph.producer[v] in block) for block in blocks]
        self.kept = np.minimum(1, owned / np.maximum(1, self.bytes))
        where = [block_of.get(k, -1) if k <= end else self._backward_of(k, block_of) for k in range(len(graph))]
        is_later = np.arange(len(graph)) > end
        cost, place = np.array([operation.cost for operation in graph.operations], float), np.array(where)
        beside = self._beside(number)
        inside = [(place == i) & side for side in (~is_later, is_later) for i in range(len(blocks))]
        times = [cost[mask].sum() for mask in inside]
        rests = [beside[mask].max(initial=0) for mask in inside]
        self.forward_ns, self.backward_ns = np.split(np.array(times), 2)
        self.rest_forward, self.rest_backward = np.split(np.array(rests, float), 2)
        self.rest = float(beside[place < 0].max(initial=0))

    def _backward_of(self, k: int, block_of: dict[int, int]) -> int:
        anchor = self.of.forward.anchor[k]
        return -1 if anchor < 0 else block_of.get(self.of.forward.operations[anchor], -1)

    def _beside(self, number: dict[int, int]) -> np.ndarray:
        """[N] bytes held while each operation of the plain step runs, without the blocks' activations."""
        graph, change = self.graph, np.zeros(len(self.graph) + 1, np.int64)
        for v in number:
            change[graph.producer[v]] += graph.values[v].bytes
            change[max(graph.users[v]) + 1] -= graph.values[v].bytes
        running = simulate(graph, Plan.from_order(graph, range(len(graph)))).running_bytes
        return running - np.cumsum(change)[:-1]

    def shares(self, budget_bytes: float) -> np.ndarray | None:
        """[3, L] shares that are kept, rebuilt and copied in the least time, or None."""
        from scipy.optimize import linprog

        n, size = len(self.bytes), self.bytes
        none, eye = np.zeros((n, n)), np.eye(n)
        below = np.tril(np.ones((n, n)), -1) * size
        before = np.eye(n, k=-1) @ np.diag(size)
        rows = [
            *[np.hstack([below, none, before])] * 2, np.hstack([size, np.zeros(2 * n)])[None, :],
            *[np.hstack([none, none, np.diag(size)])] * 2,
        ]  # fmt: skip
        rates = [self.link.to_host * self.link.duplex / 1e9, self.link.from_host * self.link.duplex / 1e9]
        sides = [
            budget_bytes - size - self.rest_forward, budget_bytes - size - self.rest_backward,
            [budget_bytes - self.rest], rates[0] * self.forward_ns, rates[1] * self.backward_ns,
        ]  # fmt: skip
        if self.link.host_bytes is not None:
            rows.append(np.hstack([np.zeros(2 * n), size])[None, :])
            sides.append([self.link.host_bytes])
        bounds = [*zip(self.kept, np.ones(n), strict=True), *[(0, 1)] * n, *[(0, 1)] * (n - 1), (0, 0)]
        cost = np.hstack([np.zeros(n), self.forward_ns, np.zeros(n)])
        found = linprog(
            cost, np.vstack(rows), np.hstack(sides), np.hstack([eye, eye, eye]), np.ones(n), bounds, method="highs"
        )
        return found.x.reshape(3, n) if found.status == 0 else None

    def load(self, shares: np.ndarray) -> bool:
        """Load the plan of each block's greedy ranking; whether there was room."""
        rebuilt, copied = set[int](), set[int]()
        for i in range(len(self.bytes)):
            again, away = self._ranked(i, *shares[:, i])
            rebuilt |= again
            copied |= away
        return self.of.load(self.search, rebuilt, copied, self.held)

    def _ranked(self, i: int, keep: float, rebuild: float, copy: float) -> tuple[set[int], set[int]]:
        """What a block rebuilds, and what it copies."""
        graph, total = self.graph, self.bytes[i]
        size = {v: graph.values[v].bytes for v in self.activations[i]}
        order = sorted(size, key=lambda v: (-graph.operations[graph.producer[v]].cost / size[v], v))
        left = [v for v in order if v not in self.held]
        copied = _fill([v for v in left if size[v] >= LEAST_BYTES], size, copy * total)
        cheap = [v for v in reversed(left) if self.of.may_rebuild(v) and v not in copied]
        rebuilt = _fill(cheap, size, rebuild * total)
        gap = total * (1 - keep) - sum(size[v] for v in rebuilt | copied)
        more = [v for v in cheap if v not in rebuilt]
        rebuilt |= _fill(more, size, gap)
        gap = total * (1 - keep) - sum(size[v] for v in rebuilt | copied)
        over = [v for v in more if v not in rebuilt and size[v] >= 0.95 * gap]
        return rebuilt | ({min(over, key=lambda v: (size[v], v))} if gap > 0 and over else set()), copied


def _fill(order: Sequence[int], size: dict[int, int], most: float) -> set[int]:
    """Those of these values that fit, one after the other."""
    chosen = set[int]()
    for v in order:
        if size[v] <= most:
            chosen.add(v)
            most -= size[v]
    return chosen
