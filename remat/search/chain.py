"""A plan for a graph whose blocks repeat: plans of one block, and dynamic programming over the chain of blocks.

A plan of a block holds some bytes between its passes and needs some while they run. These numbers add up over blocks.
So a program over (block, bytes held before it) finds the cheapest plan for each block, as in Rotor (Beaumont et al.,
2019), where a block is a stage of a chain. Here a stage has any number of plans, found by annealing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.search.anneal import minimise_cost
from remat.search.greedy import greedy_eviction
from remat.search.repeats import Repeats, find_repeats
from remat.search.timeline import Sizes, Timeline
from remat.simulator import simulate

SLOTS = 16_384  # of memory, in the program
N_KEPT, PEAKS = 12, (1.0, 0.5, 0.1)  # limits tried: of what is held between the passes, of what a pass needs
MOVES = 60_000  # for each plan of a block: with a quarter of it, plans cost several times as much
TRIES = 6  # of the program, until the simulator agrees


@dataclass(frozen=True, slots=True)
class Option:
    """A plan of a stretch: its operations in the order in which its passes compute them.

    Attributes:
        forward, backward: offsets in (forward operations, backward operations) of the stretch.
        held: bytes between the passes. peak: most bytes in a pass. Both without what is held outside.
        cost: of all computations.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    held: int
    peak: int
    cost: int

    def beats(self, other: Option) -> bool:
        """Whether it is nowhere worse, and somewhere better."""
        mine, theirs = (self.held, self.peak, self.cost), (other.held, other.peak, other.cost)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Operations that are planned together: a run of the forward pass, and a run of the backward pass.

    Attributes:
        own: its operations, one that stands for all between its passes, and values; what it reads from outside is
            there throughout and takes no bytes.
    """

    forward: range
    backward: range
    own: Graph

    @classmethod
    def of(cls, graph: Graph, forward: range, backward: range) -> Stretch:
        """The stretch of these operations."""
        inside = [*forward, *backward]
        mine = set(inside)
        values = [v for k in inside for v in graph.operations[k].outputs]
        number = {v: i for i, v in enumerate(values)}
        between = set[int]()
        kept = set[int]()
        for v in values:
            others = [u for u in graph.users[v] if u not in mine]
            is_early = graph.producer[v] in forward
            if is_early and any(u < backward.start for u in others):
                between.add(number[v])
            if graph.values[v].keep or any(u >= backward.stop for u in others):
                kept.add(number[v])

        def local(op: Operation) -> Operation:
            inputs = tuple(sorted(number[v] for v in op.inputs if v in number))
            outputs = tuple(number[v] for v in op.outputs)
            return replace(op, inputs=inputs, outputs=outputs, work=None, implementations=())

        middle = Operation("between", "between", tuple(sorted(between)), (), run_once=True)
        operations = [local(graph.operations[k]) for k in inside]
        operations.insert(len(forward), middle)
        own = tuple(Value(graph.values[v].name, graph.values[v].bytes, i in kept) for i, v in enumerate(values))
        return cls(forward, backward, Graph(graph.name, tuple(operations), own))

    @property
    def middle(self) -> int:
        """The operation between the passes."""
        return len(self.forward)

    def option(self, plan: Plan) -> Option:
        """A plan of `own` as an option."""
        trace = simulate(self.own, plan)
        order = trace.order.tolist()
        i = order.index(self.middle)
        peaks = np.delete(trace.running_bytes, i)
        held = int(trace.running_bytes[i]) - self.own.operations[self.middle].workspace_bytes
        backward = tuple(k if k < self.middle else k - 1 for k in order[i + 1 :])
        return Option(tuple(order[:i]), backward, held, int(peaks.max(initial=0)), trace.cost)

    def resized(self, option: Option) -> Option:
        """The option of a stretch with the same operations, whose sizes and costs differ."""
        backward = [k + 1 if k >= self.middle else k for k in option.backward]
        return self.option(Plan.from_order(self.own, [*option.forward, self.middle, *backward]))

    def options(self, seed: int, threads: int, deadline: float) -> list[Option]:
        """Plans that differ in what they hold between the passes, what they need at most, and their cost."""
        plain = self.option(Plan.from_order(self.own, range(len(self.own))))
        least_held = sum(self.own.values[v].bytes for v in self.own.operations[self.middle].inputs)
        least = max(_need(self.own, op) for op in self.own.operations)
        limits = [
            (round(least_held + share * (plain.held - least_held)), round(least + high * (plain.peak - least)))
            # In the order of reversed bits, so that a search that is cut short has plans from all over the range.
            for share in sorted(np.linspace(0, 1, N_KEPT), key=lambda share: f"{round(share * (N_KEPT - 1)):04b}"[::-1])
            for high in PEAKS
        ]

        def found(limit: tuple[int, int]) -> Option | None:
            return self._within(*limit, seed) if time.monotonic() < deadline else None

        with ThreadPoolExecutor(threads) as pool:
            options = [plain, *(each for each in pool.map(found, limits) if each is not None)]
        return [a for a in dict.fromkeys(options) if not any(b.beats(a) for b in options)]

    def _within(self, held: int, peak: int, seed: int) -> Option | None:
        """A cheap option within both limits; the operation between the passes needs what `held` leaves of `peak`."""
        operations = list(self.own.operations)
        operations[self.middle] = replace(operations[self.middle], workspace_bytes=max(0, peak - held))
        graph = replace(self.own, operations=tuple(operations))
        start = greedy_eviction(graph, peak)
        best = minimise_cost(
            graph, peak, None if start is None else start.order, seed=seed, work_limit=MOVES,
            target_cost=graph.total_cost,
        )  # fmt: skip
        plan = best.plan(self.own)
        return None if plan is None else self.option(plan)


def _need(graph: Graph, op: Operation) -> int:
    return op.workspace_bytes + sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs))


class Chain:
    """The stretches of a graph with repeated blocks: all before the blocks, the blocks, all between their passes."""

    def __init__(self, graph: Graph, repeats: Repeats) -> None:
        n = repeats.n_blocks
        last = repeats.forward_of(n - 1).stop, repeats.backward_of(n - 1).start
        after = repeats.backward_of(0).stop
        self.graph, self.repeats = graph, repeats
        self.before, self.after = range(repeats.forward), range(after, len(graph))
        self.blocks = [(repeats.forward_of(k), repeats.backward_of(k)) for k in range(n)]
        self.turn = Stretch.of(graph, range(*last), range(last[1], last[1]))
        self.block = Stretch.of(graph, *self.blocks[n // 2])

    def order(self, options: Sequence[Option], turn: Option) -> tuple[list[int], np.ndarray]:
        """(computations, [2 blocks + 2] where each block's forward pass, the turn, and each block's backward begin)."""
        order, begins = [*self.before], list[int]()
        for (forward, _), option in zip(self.blocks, options, strict=True):
            begins.append(len(order))
            order += [forward[i] for i in option.forward]
        begins.append(len(order))
        order += [self.turn.forward[i] for i in turn.forward]
        for (forward, backward), option in reversed([*zip(self.blocks, options, strict=True)]):
            begins.append(len(order))
            order += [forward[i] if i < len(forward) else backward[i - len(forward)] for i in option.backward]
        begins.append(len(order))
        return [*order, *self.after], np.array(begins)

    def timeline(self, option: Option, turn: Option) -> Timeline:
        """Of the plan in which all blocks follow this option; the same at every size of the step."""
        order = self.order([option] * len(self.blocks), turn)[0]
        return Timeline.of(self.graph, Plan.from_order(self.graph, order))

    def measured(
        self, option: Option, turn: Option, timeline: Timeline, sizes: Sizes
    ) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where all blocks follow this option: what each block adds, and what it needs above all before it.

        Returns:
            ([blocks] bytes added, [blocks] bytes needed, bytes before the first block, bytes that the turn needs)
        """
        n = len(self.blocks)
        order, begins = self.order([option] * n, turn)
        running = timeline.running_bytes(sizes)
        held = np.empty(n + 1, dtype=np.int64)
        for k in range(n + 1):
            op = self.graph.operations[order[begins[k]]]
            held[k] = running[begins[k]] - op.workspace_bytes - sum(self.graph.values[v].bytes for v in op.outputs)
        peaks = np.array([running[a:b].max() for a, b in pairwise(begins)])
        needs = np.maximum(peaks[:n], peaks[:n:-1]) - held[:-1]
        return np.diff(held), needs, int(held[0]), int(peaks[n] - held[n])


def chain_plan(
    graph: Graph, budget_bytes: int, *, seed: int = 0, threads: int = 1, deadline: float = float("inf")
) -> Plan | None:
    """The cheapest plan in which each block follows one of the plans of a block; None without blocks or such a plan."""
    plans = BlockPlans.of(graph, seed=seed, threads=threads, deadline=deadline)
    return None if plans is None else plans.within(budget_bytes)


class BlockPlans:
    """Plans of the blocks of a graph. One search for them serves every budget, and every size of the step."""

    def __init__(
        self, chain: Chain, options: Sequence[Option], turns: Sequence[Option], timelines: Sequence[Timeline] = ()
    ) -> None:
        self.chain, self.options, self.turns = chain, options, turns
        self.timelines = timelines or [chain.timeline(option, turns[0]) for option in options]
        self.program = _Program(chain, options, turns, self.timelines)

    @classmethod
    def of(
        cls, graph: Graph, *, seed: int = 0, threads: int = 1, deadline: float = float("inf")
    ) -> BlockPlans | None:  # fmt: skip
        """Plans found by annealing; None without blocks."""
        repeats = find_repeats(graph)
        if repeats is None:
            return None
        chain = Chain(graph, repeats)
        options, turns = (each.options(seed, threads, deadline) for each in (chain.block, chain.turn))
        return cls(chain, options, turns)

    def at(self, graph: Graph) -> BlockPlans | None:
        """The same orders for the step at another size, whose operations are the same; None if its blocks are not."""
        repeats = find_repeats(graph)
        if repeats is None or repeats != self.chain.repeats:
            return None
        chain = Chain(graph, repeats)
        options = [chain.block.resized(option) for option in self.options]
        return BlockPlans(chain, options, [chain.turn.resized(option) for option in self.turns], self.timelines)

    def within(self, budget_bytes: int) -> Plan | None:
        """The cheapest plan of the whole graph within a budget; None if there is none."""
        limit = budget_bytes
        for i in range(TRIES):
            chosen = self.program.cheapest(limit)
            if chosen is None:
                return None
            plan = Plan.from_order(self.chain.graph, self.chain.order(*chosen)[0], budget_bytes)
            peak = simulate(self.chain.graph, plan).peak_bytes
            if peak <= budget_bytes:
                return plan
            # A slot, two, four, ...: the same plan must not come again.
            limit -= peak - budget_bytes + (limit >> 14 << i)
        return None

    def least(self) -> Plan | None:
        """A plan within a budget that is the smallest to one part in 1,024; None if there is none within all bytes."""
        most = self.chain.graph.fixed_bytes + sum(value.bytes for value in self.chain.graph.values)
        low, high, best = self.chain.graph.fixed_bytes, most, None
        while high - low > max(1, high >> 10):
            middle = (low + high) // 2
            plan = self.within(middle)
            low, high, best = (middle, high, best) if plan is None else (low, middle, plan)
        return best


class _Program:
    """The dynamic program over blocks and bytes held before them."""

    def __init__(
        self, chain: Chain, options: Sequence[Option], turns: Sequence[Option], timelines: Sequence[Timeline]
    ) -> None:
        self.options, self.turns, sizes = options, turns, Sizes(chain.graph)
        pairs = zip(options, timelines, strict=True)
        rows = [chain.measured(option, turns[0], timeline, sizes) for option, timeline in pairs]
        self.added, self.needs = np.array([row[0] for row in rows]), np.array([row[1] for row in rows])
        self.first, base = rows[0][2], rows[0][3]
        self.turn_needs = [base + turn.peak - turns[0].peak for turn in turns]

    def cheapest(self, limit: int) -> tuple[list[Option], Option] | None:
        """The options of the blocks and of the turn, so that all needs at most `limit` bytes."""
        unit = max(1, (limit - self.first) // SLOTS)
        room = limit - self.first - unit * np.arange(SLOTS + 2)  # [slots] left where so much is held
        cost = np.full(len(room), np.inf)
        cost[0] = 0.0
        came = []
        for k in range(self.added.shape[1]):
            best, by = np.full(len(room), np.inf), np.full(len(room), -1)
            for i, option in enumerate(self.options):
                step = round(self.added[i, k] / unit)
                reached = np.where(room >= self.needs[i, k], cost + option.cost, np.inf)
                moved = np.full(len(room), np.inf)
                if 0 <= step < len(room):
                    moved[step:] = reached[: len(room) - step]
                by[moved < best] = i
                best = np.minimum(best, moved)
            cost = best
            came.append(by)
        ends = [
            (float(np.where(room >= need, cost, np.inf).min()) + turn.cost, i)
            for i, (turn, need) in enumerate(zip(self.turns, self.turn_needs, strict=True))
        ]
        total, which = min(ends)
        if total == np.inf:
            return None
        slot = int(np.argmin(np.where(room >= self.turn_needs[which], cost, np.inf)))
        chosen = list[Option]()
        for k in reversed(range(len(came))):
            i = int(came[k][slot])
            chosen.append(self.options[i])
            slot -= round(self.added[i, k] / unit)
        return chosen[::-1], self.turns[which]
