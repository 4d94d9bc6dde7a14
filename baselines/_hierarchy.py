"""Parts of a training graph within parts: for each, options that hold less between its forward and its backward pass.

A part is a run of the forward pass with the backward operations that belong to it. An option of a part is a set of
values that it drops after its forward pass and computes again when its backward pass reads them. A small part tries
every set of values that it alone reads. A large part is split where the fewest bytes cross; it combines the options of
its halves and drops values that cross as well. Equal parts are solved once.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from baselines._forward import Forward
from remat import Graph

SMALL = 12  # forward operations of a part that is not split
EVERY_SET = 8  # values up to which every set of them is tried
MOST_OPTIONS = 24  # of a part
NARROW = 1000  # a cut's own bytes are large against those that cross beside them: all of the pass over so many


@dataclass(frozen=True, slots=True)
class Option:
    """What a part does. Bytes are those of its own values; the backward pass counts the gradients it reads too.

    Attributes:
        dropped: values between the passes, as places in `Part.values`.
        backward: computations of the backward pass, as places in `Part.operations`.
        saved: bytes held between the passes; saving, returning: most in the forward and in the backward pass.
        cost: of the backward pass.
    """

    dropped: frozenset[int]
    backward: tuple[int, ...]
    saved: int
    saving: int
    returning: int
    cost: int

    def beats(self, other: Option) -> bool:
        """Whether it is nowhere worse, and somewhere better."""
        pairs = [(getattr(self, name), getattr(other, name)) for name in ("saved", "saving", "returning", "cost")]
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


class Part:
    """A run of the forward pass with its backward operations; operations and values have places in lists of its own.

    Attributes:
        forward, backward: operations of the graph, ascending.
        operations, values: of the graph; the forward ones come first. Gradients from outside are the last values.
        may_drop: places of values that only this part reads, in its backward pass too.
        key: equal for equal parts.
    """

    def __init__(self, forward: Forward, run: Sequence[int], backward: Sequence[int]) -> None:
        self.whole, self.forward, self.backward = forward, run, backward
        graph, inside = forward.graph, {*run, *backward}
        self.operations = [*run, *backward]
        made = [v for k in self.operations for v in graph.operations[k].outputs]
        read = dict.fromkeys(v for k in backward for v in graph.operations[k].inputs)
        is_early = set(forward.region)
        gradients = [v for v in read if graph.producer[v] not in inside and graph.producer[v] not in is_early]
        self.values = [*made, *gradients]
        self.place = {v: i for i, v in enumerate(self.values)}
        self.size = [graph.values[v].bytes for v in self.values]
        self.reads = [[self.place[v] for v in graph.operations[k].inputs if v in self.place] for k in self.operations]
        self.makes = [[self.place[v] for v in graph.operations[k].outputs] for k in self.operations]
        self.maker = {v: k for k, outputs in enumerate(self.makes) for v in outputs}
        self.stays = [
            (v in read and self.place[v] >= len(made)) or graph.values[v].keep or not graph.values[v].bytes
            or graph.operations[graph.producer[v]].run_once or any(u not in inside for u in graph.users[v])
            for v in self.values
        ]  # fmt: skip
        early = {v for k in run for v in graph.operations[k].outputs}
        self.may_drop = [self.place[v] for v in read if v in early and not self.stays[self.place[v]]]
        self.key = self._key(graph)

    def _key(self, graph: Graph) -> tuple[object, ...]:
        ops = [graph.operations[k] for k in self.operations]
        labels = tuple((op.kind, op.cost, op.workspace_bytes, op.run_once) for op in ops)
        keep = tuple(graph.values[v].keep for v in self.values)
        wires = tuple(map(tuple, self.reads)), tuple(map(tuple, self.makes))
        return len(self.forward), labels, wires, tuple(self.size), tuple(self.stays), keep

    def option(self, dropped: frozenset[int]) -> Option:
        """The option that drops these values; what the backward pass reads of them is computed right before it."""
        graph, n = self.whole.graph, len(self.forward)
        early = {v for outputs in self.makes[:n] for v in outputs}
        held = {v for v in early if self.stays[v]} | {v for reads in self.reads[n:] for v in reads if v in early}
        held -= dropped
        order, there = list[int](), set(held)
        for k in range(n, len(self.operations)):
            again = self._missing(k, there, early)
            order += [*again, k]
            there.update(v for j in again for v in self.makes[j])
        ends = {v for v in range(len(self.maker)) if graph.values[self.values[v]].keep}
        ends |= {v for v in range(len(self.maker)) if self.stays[v] and v not in early}
        given = held | set(range(len(self.maker), len(self.values)))
        return Option(
            dropped, tuple(order), sum(self.size[v] for v in held), self._most(range(n), set(), held),
            self._most(order, given, ends), sum(graph.operations[self.operations[k]].cost for k in order),
        )  # fmt: skip

    def _missing(self, k: int, there: Collection[int], early: Collection[int]) -> list[int]:
        """Forward operations to compute again before operation k, ascending."""
        missing, todo = set[int](), [k]
        while todo:
            for v in self.reads[todo.pop()]:
                if v in early and v not in there and self.maker[v] not in missing:
                    missing.add(self.maker[v])
                    todo.append(self.maker[v])
        return sorted(missing)

    def _most(self, order: Sequence[int], given: set[int], ends: set[int]) -> int:
        """Most bytes while these operations run, with what is given; each copy is freed at its last use."""
        live, freed = set(ends), list[list[int]]()
        for k in reversed(order):
            free = [v for v in (*self.makes[k], *self.reads[k]) if v not in live]
            freed.append(free)
            live.difference_update(self.makes[k])
            live.update(self.reads[k])
        held, there, most = sum(self.size[v] for v in given), set(given), 0
        operations = self.whole.graph.operations
        for k, free in zip(order, reversed(freed), strict=True):
            held += sum(self.size[v] for v in self.makes[k] if v not in there)
            there.update(self.makes[k])
            most = max(most, held + operations[self.operations[k]].workspace_bytes)
            held -= sum(self.size[v] for v in free if v in there)
            there.difference_update(free)
        return most

    def halves(self) -> tuple[Part, Part]:
        """Two parts, split where the fewest bytes cross, in the middle half."""
        graph, run = self.whole.graph, self.forward
        at = range(len(run) // 4 + 1, len(run) - len(run) // 4)

        def crossing(i: int) -> tuple[int, int]:
            after = set(run[i:])
            crosses = [v for k in run[:i] for v in graph.operations[k].outputs if not after.isdisjoint(graph.users[v])]
            return sum(graph.values[v].bytes for v in crosses), abs(2 * i - len(run))

        cut = run[min(at, key=crossing)]
        home = self.whole.operations
        is_late = [self.whole.anchor[k] >= 0 and home[self.whole.anchor[k]] >= cut for k in self.backward]
        late = [k for k, late in zip(self.backward, is_late, strict=True) if late]
        early = [k for k, late in zip(self.backward, is_late, strict=True) if not late]
        first = Part(self.whole, [k for k in run if k < cut], early)
        return first, Part(self.whole, [k for k in run if k >= cut], late)


class Solver:
    """Options of parts; equal parts are solved once.

    Attributes:
        work: operations in all options evaluated.
        solved: number of different parts.
        levels: of parts within parts.
    """

    def __init__(self, ends: Callable[[int], bool]) -> None:
        """`ends`, given the work done, says whether parts get no more options."""
        self.ends, self.work = ends, 0
        self.known: dict[tuple[object, ...], list[Option]] = {}
        self.levels = 1

    def is_over(self) -> bool:
        return self.ends(self.work)

    @property
    def solved(self) -> int:
        return len(self.known)

    def options(self, part: Part, level: int = 1) -> list[Option]:
        """Options of a part, from all saved to the least saved."""
        self.levels = max(self.levels, level)
        if part.key not in self.known:
            found = [part.option(frozenset())]
            if len(part.may_drop) <= EVERY_SET:
                sizes = range(1, len(part.may_drop) + 1)
                sets = itertools.chain.from_iterable(itertools.combinations(part.may_drop, size) for size in sizes)
                found += [self._evaluated(part, frozenset(each)) for each in sets if not self.is_over()]
            elif len(part.forward) <= SMALL:
                found += self._descent(part, found[0], [[frozenset({v})] for v in part.may_drop])
            else:
                found += self._combined(part, found[0], level)
            self.known[part.key] = thinned(found)
        return self.known[part.key]

    def _combined(self, part: Part, plain: Option, level: int) -> Iterator[Option]:
        """Options of the halves together, and of values that cross between them."""
        steps, inner = list[list[frozenset[int]]](), set[int]()
        for half in part.halves():
            inner |= {part.place[half.values[v]] for v in half.may_drop}
            rows = self.options(half, level + 1)
            steps.append([frozenset(part.place[half.values[v]] for v in row.dropped) for row in rows if row.dropped])
        steps += [[frozenset({v})] for v in part.may_drop if v not in inner]
        yield from self._descent(part, plain, steps)

    def _descent(self, part: Part, plain: Option, choices: Sequence[Sequence[frozenset[int]]]) -> Iterator[Option]:
        """Drop more and more: of each row of choices at most one set, next always where a byte costs least.

        A price is found anew only when it is the least, because most prices change little or rise.
        """
        chosen, current, drops = [frozenset[int]()] * len(choices), plain, 0
        todo = [(-1.0, -1, i, j) for i, row in enumerate(choices) for j in range(len(row))]  # price, when, which
        found: dict[tuple[int, int], Option] = {}
        while todo and not self.is_over():
            _, when, i, j = heapq.heappop(todo)
            if when == drops:
                chosen[i], current, drops = choices[i][j], found[i, j], drops + 1
                yield current
                continue
            others = frozenset[int]().union(*chosen[:i], *chosen[i + 1 :])
            found[i, j] = self._evaluated(part, others | choices[i][j])
            fewer = current.saved - found[i, j].saved
            if fewer > 0:
                heapq.heappush(todo, ((found[i, j].cost - current.cost) / fewer, drops, i, j))

    def _evaluated(self, part: Part, dropped: frozenset[int]) -> Option:
        self.work += len(part.operations)
        return part.option(dropped)


def narrow_places(forward: Forward) -> list[int]:
    """Operations of the forward pass after which it reads little else of what was made before than their outputs."""
    graph, run = forward.graph, forward.region
    rank = {k: i for i, k in enumerate(run)}
    crossing, total = np.zeros(len(run) + 1, dtype=np.int64), 0
    for k in run:
        for v in graph.operations[k].outputs:
            last = max((rank[u] for u in graph.users[v] if u in rank), default=rank[k])
            total += graph.values[v].bytes
            crossing[rank[k] + 1] += graph.values[v].bytes  # after its own operation it is not in the way
            crossing[max(last, rank[k] + 1)] -= graph.values[v].bytes
    narrow = np.cumsum(crossing)[: len(run) - 1] * NARROW <= total
    return [run[i] for i in np.flatnonzero(narrow).tolist()]


def thinned(options: Sequence[Option]) -> list[Option]:
    """Options that no other one beats, most saved first; of too many those with evenly spread savings."""
    front = [a for a in dict.fromkeys(options) if not any(b.beats(a) for b in options)]
    front = sorted(front, key=lambda option: (-option.saved, option.cost))
    if len(front) <= MOST_OPTIONS:
        return front
    return [front[round(i * (len(front) - 1) / (MOST_OPTIONS - 1))] for i in range(MOST_OPTIONS)]
