"""A plan for a graph whose blocks repeat: plans of one block, and dynamic programming over the chain of blocks.

A plan of a block holds some bytes between its passes and needs some while they run. These numbers add up over blocks.
So a program over (block, bytes held before it) finds the cheapest plan for each block, as in Rotor (Beaumont et al.,
2019), where a block is a stage of a chain. Here a stage has any number of plans, found by annealing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from remat.arrays import GraphArrays
from remat.graph import Graph, Operation, Value
from remat.plan import Plan
from remat.search.anneal import minimise_cost
from remat.search.greedy import greedy_eviction
from remat.search.repeats import Repeats, are_equal, find_repeats
from remat.search.timeline import Sizes, Timeline

SLOTS = 16_384  # of memory, in the program
N_KEPT, PEAKS = 12, (1.0, 0.5, 0.1)  # limits tried: of what is held between the passes, of what a pass needs
LEAST_OPERATIONS = 150  # smaller blocks are planned together too, in the plan of one graph
MOVES = 60_000  # for each plan of a block: with a quarter of it, plans cost several times as much
# For a group of small blocks: limits of what is held, in shares of what a budget leaves it; times they are tried.
NEAR, TURNS = (1.0, 1.15, 0.85, 1.35, 0.7, 1.7, 0.5), 2
TRIES = 6  # of the program, until the simulator agrees


@dataclass(frozen=True, slots=True)
class Option:
    """A plan of a stretch: its operations in the order in which its passes compute them.

    Attributes:
        forward, backward: offsets in (forward operations, backward operations) of the stretch.
        held: bytes between the passes. peak: most bytes in a pass. Both without what is held outside.
        cost: of all computations.
        n_blocks: of the stretch, see `Stretch`.
        timeline: of the plan of `Stretch.own`; the same at every size of the step.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    held: int
    peak: int
    cost: int
    timeline: Timeline = field(compare=False)
    n_blocks: int

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
        arrays, sizes: of `own`.
        n_blocks: number of neighbouring blocks; 1 for other stretches.
    """

    forward: range
    backward: range
    own: Graph
    arrays: GraphArrays
    sizes: Sizes
    n_blocks: int

    @classmethod
    def of(cls, graph: Graph, forward: range, backward: range, n_blocks: int = 1) -> Stretch:
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
        alone = Graph(graph.name, tuple(operations), own)
        return cls(forward, backward, alone, GraphArrays.of(alone), Sizes(alone), n_blocks)

    @property
    def middle(self) -> int:
        """The operation between the passes."""
        return len(self.forward)

    def option(self, order: Sequence[int] | np.ndarray) -> Option:
        """Computations of `own` as an option."""
        return self._measured(Timeline.of(self.arrays, np.asarray(order)))

    def resized(self, option: Option) -> Option:
        """The option of a stretch with the same operations, whose sizes and costs differ."""
        return self._measured(option.timeline)

    def _measured(self, timeline: Timeline) -> Option:
        order, running = timeline.order.tolist(), timeline.running_bytes(self.sizes)
        i = order.index(self.middle)
        peak = int(np.delete(running, i).max(initial=0))
        held = int(running[i]) - self.own.operations[self.middle].workspace_bytes
        backward = tuple(k if k < self.middle else k - 1 for k in order[i + 1 :])
        return Option(tuple(order[:i]), backward, held, peak, timeline.cost(self.sizes), timeline, self.n_blocks)

    def options(self, seed: int, threads: int, deadline: float) -> list[Option]:
        """Plans that differ in what they hold between the passes, what they need at most, and their cost."""
        plain = self.option(range(len(self.own)))
        least_held = sum(self.own.values[v].bytes for v in self.own.operations[self.middle].inputs)
        least = max(_need(self.own, op) for op in self.own.operations)
        # In the order of reversed bits, so that a search that is cut short has plans from all over the range.
        shares = sorted(np.linspace(0, 1, N_KEPT), key=lambda share: f"{round(share * (N_KEPT - 1)):04b}"[::-1])
        limits = [
            (round(least_held + share * (plain.held - least_held)), round(least + high * (plain.peak - least)))
            for share in (shares if self.backward else [1.0])  # with one pass, all that it keeps is held at its end
            for high in PEAKS
        ]
        most = [limit for limit in limits if limit[0] == plain.held]

        def found(limit: tuple[int, int]) -> Option | None:
            return self._within(*limit, seed) if time.monotonic() < deadline else None

        with ThreadPoolExecutor(threads) as pool:
            by_limit = dict(zip(most, pool.map(found, most), strict=True))
            # Where the most that is held does not suffice, less does not.
            further = [each for each in limits if each not in by_limit and by_limit[plain.held, each[1]] is not None]
            by_limit |= zip(further, pool.map(found, further), strict=True)
        options = [plain, *(each for limit in limits if (each := by_limit.get(limit)) is not None)]
        return _front(options)

    def options_near(
        self, held: int, known: Sequence[Option], halves: Sequence[Option], seed: int, threads: int, deadline: float
    ) -> list[Option]:
        """The known options, and further ones that hold about so many bytes between the passes.

        A search begins from the cheapest option that holds no more: one of these, or two of `halves` in a row.
        """
        plain = self.option(range(len(self.own)))
        found, joined = [plain, *known], self.joined(halves)

        def find(share: float) -> None:
            most = min(plain.held, round(share * held))
            starts = [each for each in (*found, *joined) if each.held <= most]
            start = min(starts, key=lambda each: each.cost, default=None)
            if time.monotonic() < deadline and (option := self._within(most, plain.peak, seed, start)) is not None:
                found.append(option)

        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(find, NEAR):
                pass
        return _front(found)

    def joined(self, halves: Sequence[Option]) -> list[Option]:
        """Every pair of options of half the blocks, one after the other, without pairs that others beat."""
        found = [
            self.option([
                *self._places(a.forward, 0, 2), *self._places(b.forward, 1, 2), self.middle,
                *self._places(b.backward, 1, 2), *self._places(a.backward, 0, 2),
            ])
            for a, b in itertools.product(halves, repeat=2)
        ]  # fmt: skip
        return _front(found)

    def segments(self, ones: Sequence[Option]) -> list[Option]:
        """Options whose backward pass begins with another forward pass: the segments of Chen et al. (2016).

        Between the passes they hold what is read behind the blocks, and what may not be computed twice. In the other
        forward pass each block follows one of its options, `ones`.
        """
        n, blocks = self.n_blocks, range(self.n_blocks)
        found = list[Option]()
        for one in ones:
            again = [i for b in blocks for i in self._places(one.forward, b, n)]
            backward = [i for b in reversed(blocks) for i in self._places(one.backward, b, n)]
            found.append(self.option([*range(self.middle + 1), *self._needed(again, backward), *backward]))
        return _front(found)

    def _places(self, inside: Sequence[int], part: int, n_parts: int) -> list[int]:
        """In `own`, of operations of one of equal parts; the last part comes first in the backward pass."""
        n_forward, n_backward = len(self.forward) // n_parts, len(self.backward) // n_parts
        later = 1 + self.middle + n_backward * (n_parts - 1 - part) - n_forward
        return [i + (part * n_forward if i < n_forward else later) for i in inside]

    def _needed(self, again: Sequence[int], later: Sequence[int]) -> list[int]:
        """Those of `again` that the later computations need, and that may run twice; what is held stays."""
        operations, values = self.own.operations, self.own.values
        held, read, needed = {*operations[self.middle].inputs}, set[int](), list[int]()
        for i in reversed(later):
            read = (read - {*operations[i].outputs}) | {*operations[i].inputs}
        read -= held
        for i in reversed(again):
            op = operations[i]
            may_repeat = not op.run_once and not any(values[v].keep for v in op.outputs)
            if may_repeat and not read.isdisjoint(op.outputs):
                read = (read - {*op.outputs}) | ({*op.inputs} - held)
                needed.append(i)
        return needed[::-1]

    def _within(self, held: int, peak: int, seed: int, known: Option | None = None) -> Option | None:
        """A cheap option within both limits; the operation between the passes needs what `held` leaves of `peak`.

        The search begins from the `known` option; without one, from greedy eviction.
        """
        operations = list(self.own.operations)
        operations[self.middle] = replace(operations[self.middle], workspace_bytes=max(0, peak - held))
        graph = replace(self.own, operations=tuple(operations))
        if known is not None:
            start = known.timeline.order
        else:
            evicted = greedy_eviction(graph, peak)
            start = None if evicted is None else evicted.order
        best = minimise_cost(graph, peak, start, seed=seed, work_limit=MOVES, target_cost=graph.total_cost)
        return None if best.order is None or best.excess else self.option(best.order)


def _front(options: Sequence[Option]) -> list[Option]:
    """Options that no other one beats, each once."""
    return [a for a in dict.fromkeys(options) if not any(b.beats(a) for b in options)]


def _calls(graph: Graph) -> list[tuple[object, ...]]:
    return [(op.kind, op.inputs, op.outputs) for op in graph.operations]


def _need(graph: Graph, op: Operation) -> int:
    return op.workspace_bytes + sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs))


class Chain:
    """The stretches of a graph with repeated blocks: all before the blocks, the blocks, all between their passes.

    Attributes:
        groups: [i] neighbouring blocks that are planned together, 2 ** i of them, in the middle.
    """

    def __init__(self, graph: Graph, repeats: Repeats, n_groups: int = 1) -> None:
        n = repeats.n_blocks
        last = repeats.forward_of(n - 1).stop, repeats.backward_of(n - 1).start
        after = repeats.backward_of(0).stop
        self.graph, self.repeats, self.n_blocks = graph, repeats, n
        self.before, self.after = range(repeats.forward), range(after, len(graph))
        self.turn = Stretch.of(graph, range(*last), range(last[1], last[1]))
        sizes = [2**i for i in range(n_groups)]
        self.groups = [Stretch.of(graph, *self.passes(n // 2 // size * size, size), size) for size in sizes]

    def passes(self, first: int, n_blocks: int) -> tuple[range, range]:
        """Forward and backward operations of neighbouring blocks."""
        forward, backward, last = self.repeats.forward_of, self.repeats.backward_of, first + n_blocks - 1
        return range(forward(first).start, forward(last).stop), range(backward(last).start, backward(first).stop)

    def order(self, options: Sequence[Option], turn: Option) -> tuple[list[int], np.ndarray]:
        """(computations, [2 options + 2] where the forward passes, the turn, and the backward passes begin).

        The options follow each other along all blocks.
        """
        order, begins, first = [*self.before], list[int](), 0
        passes = list[tuple[range, range, Option]]()
        for option in options:
            passes.append((*self.passes(first, option.n_blocks), option))
            first += option.n_blocks
        for forward, _, option in passes:
            begins.append(len(order))
            order += [forward[i] for i in option.forward]
        begins.append(len(order))
        order += [self.turn.forward[i] for i in turn.forward]
        for forward, backward, option in reversed(passes):
            begins.append(len(order))
            order += [forward[i] if i < len(forward) else backward[i - len(forward)] for i in option.backward]
        begins.append(len(order))
        return [*order, *self.after], np.array(begins)

    def measured(self, begins: np.ndarray, timeline: Timeline, sizes: Sizes) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Where all blocks follow one option: what each group adds, and what it needs above all before it.

        Args:
            begins, timeline: of that plan; the same at every size of the step.

        Returns:
            ([groups] bytes added, [groups] bytes needed, bytes before the first group, bytes that the turn needs)
        """
        n = len(begins) // 2 - 1
        running = timeline.running_bytes(sizes)
        held = np.empty(n + 1, dtype=np.int64)
        for k in range(n + 1):
            op = self.graph.operations[timeline.order[begins[k]]]
            held[k] = running[begins[k]] - op.workspace_bytes - sum(self.graph.values[v].bytes for v in op.outputs)
        peaks = np.array([running[a:b].max() for a, b in itertools.pairwise(begins)])
        needs = np.maximum(peaks[:n], peaks[:n:-1]) - held[:-1]
        return np.diff(held), needs, int(held[0]), int(peaks[n] - held[n])


def chain_plan(
    graph: Graph, budget_bytes: int, *, seed: int = 0, threads: int = 1, deadline: float = float("inf")
) -> Plan | None:
    """The cheapest plan in which each block follows one of the plans of a block; None without blocks or such a plan.

    Small neighbours may follow one plan together, 1, 2, 4, ... of them. Where each has a plan of its own, what one of
    them reads of another is held between the passes.
    """
    plans = BlockPlans.of(graph, seed=seed, threads=threads, deadline=deadline, budget_bytes=budget_bytes)
    return None if plans is None else plans.within(budget_bytes)


class BlockPlans:
    """Plans of the blocks of a graph. One search for them serves every budget, and every size of the step."""

    def __init__(
        self, chain: Chain, options: Sequence[Sequence[Option]], turns: Sequence[Option], of: BlockPlans | None = None
    ) -> None:
        """`options`: of each of the chain's groups. `of`: the same orders for the step at another size."""
        self.chain, self.options, self.turns, self.sizes = chain, options, turns, Sizes(chain.graph)
        self.arrays = GraphArrays.of(chain.graph) if of is None else of.arrays
        every = [*itertools.chain(*options)]
        self.uniform = [*map(self._uniform, every)] if of is None else of.uniform
        self.program = _Program(chain, every, turns, self.uniform, self.sizes)

    def _uniform(self, option: Option) -> tuple[np.ndarray, Timeline]:
        """`Chain.measured`'s arguments."""
        n_groups, rest = divmod(self.chain.n_blocks, option.n_blocks)
        order, begins = self.chain.order([option] * n_groups + [self.options[0][0]] * rest, self.turns[0])
        return begins, Timeline.of(self.arrays, np.array(order))

    @classmethod
    def of(
        cls, graph: Graph, *, seed: int = 0, threads: int = 1, deadline: float = float("inf"),
        known: dict[str, list[Option]] | None = None, like: BlockPlans | None = None, budget_bytes: int | None = None,
    ) -> BlockPlans | None:  # fmt: skip
        """Plans found by annealing; None without blocks.

        Args:
            known: [hash of a stretch] what was found for it; grows. The blocks of two steps may be the same.
            like: its orders serve where blocks run the same operations, at other sizes perhaps.
            budget_bytes: small neighbours have plans together too, for this budget.
        """
        repeats = find_repeats(graph)
        if repeats is None:
            return None
        n_groups = 1 if budget_bytes is None else repeats.n_groups(LEAST_OPERATIONS)
        if budget_bytes is not None and n_groups > 1:
            return cls._of_groups(Chain(graph, repeats, n_groups), budget_bytes, seed, threads, deadline)
        chain = Chain(graph, repeats, repeats.n_blocks.bit_length() - 1)
        known = {} if known is None else known

        def options(stretch: Stretch) -> list[Option]:
            found = None if like is None else like._options_of(stretch)
            key = stretch.own.sha256()
            if found is None and key not in known:
                known[key] = stretch.options(seed, threads, deadline)
            return known[key] if found is None else found

        ones = options(chain.groups[0])
        return cls(chain, [ones, *(group.segments(ones) for group in chain.groups[1:])], options(chain.turn))

    @classmethod
    def _of_groups(cls, chain: Chain, budget_bytes: int, seed: int, threads: int, deadline: float) -> BlockPlans:
        """Plans of groups that hold about as much as the budget leaves each: in a long chain nearly all groups do.

        The four largest sizes come first, in ascending order: a group's search begins from two of half its size.
        """
        turns = chain.turn.options(seed, threads, deadline)
        options = [[group.option(range(len(group.own)))] for group in chain.groups]
        plain = cls(chain, options[:1], turns).program
        room = max(0, budget_bytes - plain.first - max(options[0][0].peak, min(plain.turn_needs)))
        last = len(options) - 1
        first = max(0, last - 3)
        for turn, i in itertools.product(range(TURNS), [*range(first, last + 1), *range(first)]):
            if time.monotonic() < deadline:
                group, halves = chain.groups[i], options[i - 1] if i else []
                held = room * group.n_blocks // chain.n_blocks
                options[i] = group.options_near(held, options[i], halves, seed + turn, threads, deadline)
        return cls(chain, options, turns)

    def _options_of(self, stretch: Stretch) -> list[Option] | None:
        """Those of the block or the turn that runs the operations of a stretch, at its sizes; None if neither does."""
        for own, options in ((self.chain.groups[0], self.options[0]), (self.chain.turn, self.turns)):
            if _calls(own.own) == _calls(stretch.own):
                return [*map(stretch.resized, options)]
        return None

    def at(self, graph: Graph) -> BlockPlans | None:
        """The same orders for the step at another size, whose operations are the same; None if its blocks are not."""
        own = self.chain.graph
        is_same = graph.users is own.users or _calls(graph) == _calls(own)  # a resized graph keeps its users
        if not is_same or not are_equal(graph, self.chain.repeats):
            return None
        chain = Chain(graph, self.chain.repeats, len(self.chain.groups))
        options = [[*map(group.resized, own)] for group, own in zip(chain.groups, self.options, strict=True)]
        return BlockPlans(chain, options, [*map(chain.turn.resized, self.turns)], self)

    def within(self, budget_bytes: int) -> Plan | None:
        """The cheapest plan of the whole graph within a budget; None if there is none."""
        found = self.timeline_within(budget_bytes)
        return None if found is None else Plan.from_order(self.chain.graph, found.order.tolist(), budget_bytes)

    def timeline_within(self, budget_bytes: int) -> Timeline | None:
        """As `within`."""
        limit = budget_bytes
        for i in range(TRIES):
            chosen = self.program.cheapest(limit)
            if chosen is None:
                return None
            found = Timeline.of(self.arrays, np.array(self.chain.order(*chosen)[0]))
            peak = int(found.running_bytes(self.sizes).max())
            if peak <= budget_bytes:
                return found
            # A slot, two, four, ...: the same plan must not come again.
            limit -= peak - budget_bytes + (limit >> 14 << i)
        return None

    def least(self) -> Timeline | None:
        """A plan within a budget that is the smallest to one part in 1,024; None if there is none within all bytes."""
        most = self.chain.graph.fixed_bytes + sum(value.bytes for value in self.chain.graph.values)
        low, high, best = self.chain.graph.fixed_bytes, most, None
        while high - low > max(1, high >> 10):
            middle = (low + high) // 2
            found = self.timeline_within(middle)
            low, high, best = (middle, high, best) if found is None else (low, middle, found)
        return best


class _Program:
    """The dynamic program over blocks and bytes held before them. A group begins at a multiple of its size."""

    def __init__(
        self, chain: Chain, options: Sequence[Option], turns: Sequence[Option],
        uniform: Sequence[tuple[np.ndarray, Timeline]], sizes: Sizes,
    ) -> None:  # fmt: skip
        self.options, self.turns, self.n_blocks = options, turns, chain.n_blocks
        rows = [chain.measured(begins, timeline, sizes) for begins, timeline in uniform]
        # [option] [groups]
        self.added, self.needs = [row[0] for row in rows], [row[1] for row in rows]
        self.first, base = rows[0][2], rows[0][3]
        self.turn_needs = [base + turn.peak - turns[0].peak for turn in turns]

    def cheapest(self, limit: int) -> tuple[list[Option], Option] | None:
        """The options of the blocks and of the turn, so that all needs at most `limit` bytes."""
        unit, n = max(1, (limit - self.first) // SLOTS), SLOTS + 2
        # [option] [groups] slots; rounding errors of a row of equal options do not add up
        steps = [np.diff(np.rint(added.cumsum() / unit), prepend=0).astype(np.int64) for added in self.added]
        # [option] [groups], [turns] slots below which so much is left that it fits
        below = [
            np.clip((limit - self.first - needs) // unit + 1, 0, n - np.maximum(step, 0))
            for needs, step in zip(self.needs, steps, strict=True)
        ]
        below_turns = [min(n, max(0, (limit - self.first - need) // unit + 1)) for need in self.turn_needs]
        cost = np.full((self.n_blocks + 1, n), np.inf)  # [blocks before, slots held before]
        came = np.full(cost.shape, -1, dtype=np.int16)  # by this option
        spans = [(0, 1), *[(n, 0)] * self.n_blocks]  # [blocks before] finite costs are between these slots
        cost[0, 0] = 0.0
        for k, i in itertools.product(range(self.n_blocks), range(len(self.options))):
            (group, rest), after = divmod(k, size := self.options[i].n_blocks), k + size
            if rest or after > self.n_blocks:
                continue
            (low, high), step = spans[k], int(steps[i][group])
            end = min(int(below[i][group]), high)
            if step < 0 or end <= low:
                continue
            there = slice(low + step, end + step)
            reached, best = cost[k, low:end] + self.options[i].cost, cost[after, there]
            came[after, there][reached < best] = i
            np.minimum(best, reached, out=best)
            spans[after] = min(spans[after][0], there.start), max(spans[after][1], there.stop)
        total, which = min(
            (float(cost[-1, :end].min(initial=np.inf)) + turn.cost, i)
            for i, (turn, end) in enumerate(zip(self.turns, below_turns, strict=True))
        )
        if total == np.inf:
            return None
        chosen, k, slot = list[Option](), self.n_blocks, int(np.argmin(cost[-1, : below_turns[which]]))
        while k:
            i = int(came[k, slot])
            chosen.append(self.options[i])
            k -= self.options[i].n_blocks
            slot -= int(steps[i][k // self.options[i].n_blocks])
        return chosen[::-1], self.turns[which]
