"""Rows of the window relaxation (`remat.programs.windows`), one at a time, in exact arithmetic: for certificates."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from remat.bounds.cuts import MOST, is_valid
from remat.errors import InvalidInput
from remat.graph import Graph
from remat.link import Link
from remat.plan import Scope

MOST_RUNS = 500_000  # operations times boundaries, so that the checker stays within seconds and megabytes
Column = tuple[str, int, int, int]  # of windows ("S", k, k, v), ("R", k, m, i), ("U", k, j, v) or ("X", i, i, w)
Terms = list[tuple[int, Column]]  # factors and columns
Row = tuple[Terms, int]  # whose sum is at least this


class RowSums(ABC):
    """Sums multiples of rows: `right` is y b, `weight` is y A by column.

    `add` adds y times one row. A method of a subclass, named like its kind, gives a row, or None if it does not exist.
    """

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.budget_bytes, self.producer = graph, budget_bytes, graph.producer
        self.n_places = len(graph)  # operations, stages or boundaries
        self._known: dict[tuple[Any, ...], Row] = {}
        self.clear()

    def clear(self) -> None:
        """Forget the sums."""
        self.right, self.weight = 0, dict[Column, int]()

    def add(self, kind: str, row: Sequence[int], y: int) -> bool:
        """Add y times a row; False if it does not exist. The nodes of a tree use the same rows, so they are kept."""
        key = (kind, *row)
        if key not in self._known:
            found: Row | None = getattr(self, kind)(*row)
            if found is None:
                return False
            self._known[key] = found
        terms, constant = self._known[key]
        self.right += y * constant
        for factor, column in terms:
            self.weight[column] = self.weight.get(column, 0) + y * factor
        return True

    def value(self, denominator: int, fixed: Mapping[Column, int] = MappingProxyType({})) -> int:
        """y b plus the sum of the least (c - y A) x over all columns 0 <= x <= 1, times the denominator.

        Columns in `fixed` are 0 or 1.
        """
        total = self.right
        for column, weight in self.weight.items():
            reduced = self._cost(column) * denominator - weight
            total += reduced * fixed[column] if column in fixed else min(0, reduced)
        return total + denominator * sum(
            self._cost(column) for column, x in fixed.items() if x and column not in self.weight
        )

    def most(self, bound: int) -> int:
        """The bound that is proven if the multipliers give `bound`."""
        return bound

    def knapsack_row(self, k: int, room: int, most: int, terms: Sequence[int], where: str) -> Row | None:
        """Sum of a S[k,v] <= most for the terms v, a, v, a, ..., if no set of these values within the room weighs more.

        Raises:
            InvalidInput: some set does.
        """
        items, weights = terms[::2], terms[1::2]
        distinct = len(set(items)) == len(items) == len(weights)
        if not 0 <= most <= MOST or not distinct or min(weights, default=0) < 1:
            return None
        if not is_valid([self.graph.values[v].bytes for v in items], weights, room, most):
            raise InvalidInput(f"the knapsack row of {where} does not follow from its memory row")
        return [(-a, ("S", k, k, v)) for v, a in zip(items, weights, strict=True)], -most

    @abstractmethod
    def _cost(self, column: Column) -> int:
        """The cost of a column."""


class WindowRows(RowSums):
    """The rows of the window relaxation; intervals count from 0."""

    def __init__(self, graph: Graph, budget_bytes: int, boundaries: Sequence[int], scope: Scope) -> None:
        n = len(graph)
        self.t = [abs(t) for t in boundaries]
        self.done = [t if t >= 0 else -t - 1 for t in boundaries]
        ascending = all(a < b for a, b in itertools.pairwise(zip(self.t, self.done, strict=True)))
        if not ascending or min(self.done, default=-1) < 0 or max(self.done) >= n - 1:
            raise InvalidInput("the certificate's boundaries are not ascending operations before the last one")
        if n * len(boundaries) > MOST_RUNS:
            raise InvalidInput(f"a bound with {len(boundaries)} boundaries of {n} operations is too large to check")
        super().__init__(graph, budget_bytes)
        self.implementations = [operation.all_implementations for operation in graph.operations]
        inputs = [[frozenset(each.inputs) for each in own] for own in self.implementations]
        self.reads = [frozenset.union(*own) for own in inputs]
        self.always = [frozenset.intersection(*own) for own in inputs]
        self.makes = [frozenset(v for each in own for v in each.outputs) for own in self.implementations]
        self.least_cost = [min(each.cost for each in own) for own in self.implementations]
        self.users: list[list[int]] = [[] for _ in graph.values]
        for i, read in enumerate(self.reads):
            for v in read:
                self.users[v].append(i)
        self._order(scope)
        self.has_slots = not graph.has_implementations
        self.room = [budget_bytes - graph.working_set_bytes(t) for t in self.t]

    def _order(self, scope: Scope) -> None:
        """Bit k says what is certain beside boundary k.

        `before`, `after`: [N] that the first run is before or after it. `begun`: [N] that it begins before it or there.
        `serving`: [N] that another run after it may serve. `wanted`: [V] that the value may be held there.
        """
        n, every = len(self.graph), (1 << len(self.t)) - 1
        self.before = [every & -(1 << bisect_left(self.done, i)) for i in range(n)]
        self.begun = [every & -(1 << bisect_left(self.t, i)) for i in range(n)]
        self.after = [every ^ before for before in self.before]
        if scope is Scope.FREE:
            self._order_by_edges()
            self.begun = self.before
        self.serving = [0] * n
        self.wanted = [every if value.keep else 0 for value in self.graph.values]
        for i in range(n - 1, -1, -1):
            useful = 0
            for v in self.makes[i]:
                for user in self.users[v]:
                    self.wanted[v] |= self.serving[user] | every ^ self.before[user]
                useful |= self.wanted[v]
            if not self.graph.operations[i].run_once:
                self.serving[i] = useful & self.before[i]

    def _order_by_edges(self) -> None:
        """`before` and `after` in scope free, where an operation waits for those whose values it always reads."""
        n = len(self.graph)
        above = [{self.producer[v] for v in always} for always in self.always]
        self.before, self.after = [0] * n, [0] * n
        for k, t in enumerate(self.t):
            self.before[t] |= 1 << k
        for i in range(n - 1, -1, -1):
            for p in above[i]:
                self.before[p] |= self.before[i]
        for k, t in enumerate(self.t):
            self.after[t] |= 1 << k  # so that it reaches those that wait for t
        for i in range(n):
            for p in above[i]:
                self.after[i] |= self.after[p]
        for k, t in enumerate(self.t):
            self.after[t] ^= 1 << k
        if not all(self.before[t] >> k + 1 & 1 for k, t in enumerate(self.t[:-1])):
            raise InvalidInput("a boundary of the certificate does not depend on the one before it")

    def has_column(self, column: Column) -> bool:
        """Whether it is a column, under the name of its shortest window."""
        kind, k, m, i = column
        if kind == "X":
            return k == m and 0 <= k < len(self.implementations) and 0 <= i < len(self.implementations[k]) > 1
        if kind != "U" and not self._is_window(k, m):
            return False
        if kind == "S":
            return k == m and 0 <= i < len(self.producer) and self._is_held(k, i)
        if kind == "U":
            return self._is_stage(k) and 0 <= i < len(self.producer) and m in self._readers(k, i)
        return kind == "R" and self._can_run(k, i) and self._can_run(m, i)

    def decided(self, denominator: int, least: int) -> dict[Column, int]:
        """The columns whose other value adds `least`, times the denominator, or more."""
        found = {}
        for column, weight in self.weight.items():
            reduced = self._cost(column) * denominator - weight
            if abs(reduced) >= least and self.is_whole(column):
                found[column] = int(reduced < 0)
        for cost, column in self._costly:
            if cost * denominator < least:
                break
            if column not in self.weight:
                found[column] = 0
        return found

    def is_whole(self, column: Column) -> bool:
        """Whether every plan has 0 or 1 there."""
        return True

    @cached_property
    def _costly(self) -> list[tuple[int, Column]]:
        """(cost, column) of the runs in single intervals and of the choices, the most expensive first."""
        columns = [("R", k, k, i) for k, t in enumerate(self.t) for i in range(t + 1) if self._can_run(k, i)]
        several = [(i, len(own)) for i, own in enumerate(self.implementations) if len(own) > 1]
        columns += [("X", i, i, w) for i, n in several for w in range(n)]
        return sorted(((self._cost(column), column) for column in columns), reverse=True)

    def _cost(self, column: Column) -> int:
        kind, k, m, i = column
        if kind == "X":
            return self.implementations[k][i].cost - self.least_cost[k]
        return self.least_cost[i] if kind == "R" and k == m else 0

    def need(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] >= 1: a first run in the window always reads v, or v is kept and the window is the last."""
        if not self._is_window(k, m) or not self._can_lack(k, v):
            return None
        is_read = any(self._runs_first(k, m, user) and v in self.always[user] for user in self.users[v])
        is_kept = m + 1 == len(self.t) and self.graph.values[v].keep
        return (self._provided(k, m, v), 1) if is_read or is_kept else None

    def edge(self, k: int, m: int, i: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] - R[k,m,i] >= 0, for an operation i that always reads v."""
        if not self._is_window(k, m) or not self._can_run(k, i) or not self._can_lack(k, v):
            return None
        return ([*self._provided(k, m, v), self._run(-1, k, m, i)], 0) if v in self.always[i] else None

    def continuity(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] - S[m+1,v] >= 0."""
        if not self._is_window(k, m) or m + 1 == len(self.t) or not self._can_lack(k, v):
            return None
        held = (-1, ("S", m + 1, m + 1, v))
        return ([*self._provided(k, m, v), held], 0) if self._is_held(m + 1, v) else None

    def join(self, k: int, m: int, i: int) -> Row | None:
        """Sum of R[j,j,i] for j = k..m - R[k,m,i] >= 0."""
        if not self._is_window(k, m) or not self._can_run(k, i):
            return None
        singles = [self._run(1, j, j, i) for j in range(k, m + 1) if self._can_run(j, i)]
        return [*singles, self._run(-1, k, m, i)], 0

    def each(self, k: int, m: int, i: int, j: int) -> Row | None:
        """R[k,m,i] - R[j,j,i] >= 0 for k <= j <= m."""
        if not self._is_window(k, m) or not k <= j <= m or not self._can_run(k, i) or not self._can_run(j, i):
            return None
        return [self._run(1, k, m, i), self._run(-1, j, j, i)], 0

    def memory(self, k: int) -> Row | None:
        """What is held while t_k runs, beside what it reads, makes and needs, fits the budget."""
        if not 0 <= k < len(self.t):
            return None
        t = self.t[k]
        sizes = [self.graph.touched_bytes(each) for each in self.implementations[t]]
        held = [(value.bytes, ("S", k, k, v)) for v, value in enumerate(self.graph.values) if self._is_held(k, v)]
        more = [(size - min(sizes), ("X", t, t, w)) for w, size in enumerate(sizes) if size > min(sizes)]
        return within(self.room[k], [*held, *more])

    def knapsack(self, k: int, most: int, *terms: int) -> Row | None:
        """Sum of a S[k,v] <= most, if no set of these values that fits beside t_k weighs more."""
        if not 0 <= k < len(self.t) or not all(0 <= v < len(self.producer) and self._is_held(k, v) for v in terms[::2]):
            return None
        return self.knapsack_row(k, self.room[k], most, terms, f"boundary {k}")

    def choice(self, i: int) -> Row | None:
        """(sum of X[i,w] over the implementations w) >= 1."""
        if not 0 <= i < len(self.implementations) or len(self.implementations[i]) == 1:
            return None
        return [(1, ("X", i, i, w)) for w in range(len(self.implementations[i]))], 1

    def chosen(self, k: int, m: int, i: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] - (sum of X[i,w] over the w that read v) >= 0, if i first runs in the window."""
        if not self._is_window(k, m) or not self._can_lack(k, v) or not 0 <= i < len(self.reads):
            return None
        if v not in self.reads[i] or not self._runs_first(k, m, i):
            return None
        readers = [(-1, ("X", i, i, w)) for w, each in enumerate(self.implementations[i]) if v in each.inputs]
        return [*self._provided(k, m, v), *readers], 0

    def run(self, k: int, j: int, v: int) -> Row | None:
        """U[k,j,v] - R[k,k,j] >= 0."""
        return ([(1, ("U", k, j, v)), (-1, ("R", k, k, j))], 0) if self._has_need(k, j, v) else None

    def later(self, k: int, j: int, v: int) -> Row | None:
        """U[k,j,v] - U[k,j',v] >= 0 for the next j', or U[k,j,v] - S[k+1,v] >= 0."""
        if not self._has_need(k, j, v):
            return None
        following = self._need(k, j + 1, v)
        return [(1, ("U", k, j, v)), *([(-1, following)] if following else [])], 0

    def slot(self, k: int, i: int) -> Row | None:
        """What is resident while operation i runs in the stage of t_(k+1), or would run, fits the budget."""
        if not self._is_stage(k) or not self._can_run(k, i):
            return None
        scratch = self.graph.operations[i].workspace_bytes
        room, terms = self.budget_bytes - self.graph.fixed_bytes, Terms()
        if scratch:
            terms.append((scratch, ("R", k, k, i)))
        for v, value in enumerate(self.graph.values):
            if self.producer[v] <= self.t[k]:
                resident, constant = self._resident(k, i, v)
                room -= constant * value.bytes
                terms += [(factor * value.bytes, column) for factor, column in resident]
        return within(room, terms)

    def _resident(self, k: int, i: int, v: int) -> Row:
        """(factors and columns, constant): their sum is 1 only if v is resident at slot i, and else 0 or less."""
        p, is_read = self.producer[v], v in self.graph.operations[self.t[k + 1]].inputs
        if i >= p:
            column = None if is_read else self._need(k, i, v)
            return ([(1, column)] if column else []), int(is_read)
        if not self._is_at(k, v):
            return ([(1, ("S", k, k, v))] if self._is_held(k, v) else []), 0
        again: Terms = [(-1, ("R", k, k, p))] if self._can_run(k, p) else []
        if is_read:
            return again, 1
        return ([(1, ("S", k + 1, k + 1, v)), *again] if self._is_held(k + 1, v) else []), 0

    def _need(self, k: int, i: int, v: int) -> Column | None:
        """U for the first run from slot i on that makes or reads v, or else S[k+1,v]; None if there is neither."""
        j = min((j for j in self._readers(k, v) if j >= i), default=None)
        if j is not None:
            return ("U", k, j, v)
        return ("S", k + 1, k + 1, v) if self._is_held(k + 1, v) else None

    def _readers(self, k: int, v: int) -> list[int]:
        """The runs of the stage that make or read v; none if the stage's own operation reads it."""
        if v in self.graph.operations[self.t[k + 1]].inputs:
            return []
        return [j for j in (self.producer[v], *self.users[v]) if self._can_run(k, j)]

    def _has_need(self, k: int, j: int, v: int) -> bool:
        return self._is_stage(k) and 0 <= v < len(self.producer) and j in self._readers(k, v)

    def _is_stage(self, k: int) -> bool:
        """Whether interval k is one stage, of a graph without implementations."""
        return self.has_slots and 0 <= k < len(self.t) - 1 and self.t[k + 1] == self.t[k] + 1

    def _is_window(self, k: int, m: int) -> bool:
        return 0 <= k <= m < len(self.t)

    def _runs_first(self, k: int, m: int, i: int) -> bool:
        """Whether the first run of operation i is certainly in the window."""
        return bool(self.after[i] >> k & 1) and (m + 1 == len(self.t) or bool(self.begun[i] >> m + 1 & 1))

    def _is_at(self, k: int, v: int) -> bool:
        """Whether some implementation of the operation at boundary k reads or makes v."""
        return v in self.reads[self.t[k]] or v in self.makes[self.t[k]]

    def _is_held(self, k: int, v: int) -> bool:
        """Whether S[k,v] has a column: v may be held there, and fits."""
        p = self.producer[v]
        can_serve = p != self.t[k] and (self.before[p] & self.wanted[v]) >> k & 1
        return bool(can_serve) and not self._is_at(k, v) and self.graph.values[v].bytes <= self.room[k]

    def _can_lack(self, k: int, v: int) -> bool:
        """Whether v was first computed before boundary k, and may be missing there."""
        is_made = 0 <= v < len(self.producer) and bool(self.before[self.producer[v]] >> k & 1)
        return is_made and not self._is_at(k, v)

    def _can_run(self, k: int, i: int) -> bool:
        """Whether R[k,.,i] has a column."""
        return 0 <= i < len(self.graph) and bool(self.serving[i] >> k & 1)

    def _provided(self, k: int, m: int, v: int) -> Terms:
        """S[k,v] + R[k,m,p], p the producer of v."""
        held: Terms = [(1, ("S", k, k, v))] if self._is_held(k, v) else []
        return [*held, self._run(1, k, m, self.producer[v])] if self._can_run(k, self.producer[v]) else held

    def _run(self, factor: int, k: int, m: int, i: int) -> tuple[int, Column]:
        """A multiple of R[k,m,i]: the same as a shorter window's where i cannot serve in the last intervals."""
        while m > k and not self._can_run(m, i):
            m -= 1
        return factor, ("R", k, m, i)


class LinkRows(WindowRows):
    """The rows of the window relaxation with copies to the host (`remat.programs.link_windows`)."""

    def __init__(self, graph: Graph, budget_bytes: int, boundaries: Sequence[int], scope: Scope, link: Link) -> None:
        if scope is Scope.FREE or graph.has_implementations:
            raise InvalidInput("a bound with a link is one of scope staged or fixed_order, without implementations")
        super().__init__(graph, budget_bytes, boundaries, scope)
        self.has_slots = False
        self.K = len(self.t)
        self.n_places = max(len(graph), self.K + 1)
        self.out_ns = [link.out_ns(value.bytes) for value in graph.values]
        self.in_ns = [link.in_ns(value.bytes) for value in graph.values]
        self.host_bytes = link.host_bytes
        self.idle = graph.total_cost + sum(self.out_ns) + sum(self.in_ns) + 1
        self.begins = [0, *itertools.accumulate(op.cost for op in graph.operations)]

    def has_column(self, column: Column) -> bool:
        """Whether it is a column, and one of which a plan says 0 or 1."""
        kind, k, m, v = column
        may = {
            "A": self._may_come, "B": self._may_come, "W": self._may_go, "V": self._may_go_again, "H": self._is_on_host,
        }  # fmt: skip
        if kind in may:
            return k == m and may[kind](k, v)
        return kind in "SR" and super().has_column(column)

    def most(self, bound: int) -> int:
        """At most the idle time beyond which plans have no point of the relaxation."""
        return min(bound, self.idle)

    def is_whole(self, column: Column) -> bool:
        """Whether every plan has 0 or 1 there: not for shares of copies and idle times."""
        return column[0] not in "PQZ"

    def _cost(self, column: Column) -> int:
        return self.idle if column[0] == "Z" else super()._cost(column)

    def need(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] + B[j,v] of the window's stretches j, A of the last one >= 1."""
        return self._with_copies(super().need(k, m, v), k, m, v, "A")

    def edge(self, k: int, m: int, i: int, v: int) -> Row | None:
        """The same - R[k,m,i] >= 0."""
        return self._with_copies(super().edge(k, m, i, v), k, m, v, "A")

    def continuity(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] + B[j,v] of the window's stretches j - S[m+1,v] >= 0."""
        return self._with_copies(super().continuity(k, m, v), k, m, v, "B")

    def need_out(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] + W[j,v] of the stretches j before the window - P[k,v] >= 1."""
        return self._with_out(super().need(k, m, v), k, v)

    def edge_out(self, k: int, m: int, i: int, v: int) -> Row | None:
        """The same - R[k,m,i] >= 0."""
        return self._with_out(super().edge(k, m, i, v), k, v)

    def continuity_out(self, k: int, m: int, v: int) -> Row | None:
        """The same - S[m+1,v] >= 0."""
        return self._with_out(super().continuity(k, m, v), k, v)

    def out(self, j: int, v: int) -> Row | None:
        """Sum of W[i,v] for i <= j - B[j,v] >= 0."""
        return ([*self._outs(v, 0, j), (-1, ("B", j, j, v))], 0) if self._may_come(j, v) else None

    def arrived(self, j: int, v: int) -> Row | None:
        """B[j,v] - A[j,v] >= 0."""
        return ([(1, ("B", j, j, v)), (-1, ("A", j, j, v))], 0) if self._may_come(j, v) else None

    def one(self, _: int, v: int) -> Row | None:
        """Sum of W[j,v] <= 1."""
        if not 0 <= v < len(self.producer):
            return None
        return [(-1, column) for _, column in self._outs(v, 0, self.K)], -1

    def source(self, k: int, m: int, v: int) -> Row | None:
        """S[k,v] + R[k,m,p] - W[j,v] of the window's stretches j >= 0."""
        if not self._is_window(k, m) or not self._can_lack(k, v):
            return None
        return [*self._provided(k, m, v), *((-1, column) for _, column in self._outs(v, k + 1, m + 1))], 0

    def stream_out(self, j: int) -> Row | None:
        """T[j] - d (W[j,v] + V[j,v]) - d P[j-1,v] + d P[j,v] >= 0."""
        if not 0 <= j <= self.K:
            return None
        terms, constant = self._duration(j)
        for v, d in enumerate(self.out_ns):
            terms += [(-d * factor, column) for factor, column in (*self._sends(j, v), *self._going(j - 1, v))]
            terms += [(d * factor, column) for factor, column in self._going(j, v)]
        return terms, -constant

    def stream_in(self, j: int) -> Row | None:
        """T[j] - d B[j,v] - d Q[j-1,v] + d Q[j,v] >= 0."""
        if not 1 <= j <= self.K:
            return None
        terms, constant = self._duration(j)
        for v, d in enumerate(self.in_ns):
            terms += [(-d * factor, column) for factor, column in (*self._fetches(j, v), *self._coming(j - 1, v))]
            terms += [(d * factor, column) for factor, column in self._coming(j, v)]
        return terms, -constant

    def arrival(self, j: int) -> Row | None:
        """T[j] - cost of t_j - d A[j,v] - d Q[j-1,v] of what first runs in stretch j read >= 0."""
        if not 1 <= j < self.K:
            return None
        terms, constant = self._duration(j)
        terms += [(-d, ("A", j, j, v)) for v, d in enumerate(self.in_ns) if self._may_come(j, v)]
        for v, d in enumerate(self.in_ns):
            if self._is_coming(j - 1, v) and any(self.done[j - 1] < user <= self.t[j] for user in self.users[v]):
                terms.append((-d, ("Q", j - 1, j - 1, v)))
        return terms, self._own_cost(j) - constant

    def deadline(self, k: int, m: int, e: int) -> Row | None:
        """T[j] of the window - first runs from e on in it - d (1 - S[k,v] - R[k,m,p] + Q[k,v]) >= 0, v read up to e."""
        if not self._is_window(k, m) or not 0 <= e < len(self.graph) or not self._runs_first(k, m, e):
            return None
        terms, due = Terms(), 0
        for j in range(k + 1, m + 2):
            terms += self._duration(j)[0]
        for v, d in enumerate(self.in_ns):
            if self._can_lack(k, v) and any(self.done[k] < user <= e for user in self.users[v]):
                due += d
                terms += [(d * factor, column) for factor, column in self._provided(k, m, v)]
                terms += [(-d * factor, column) for factor, column in self._coming(k, v)]
        return terms, due - (self.begins[e] - self.begins[self.done[k] + 1])

    def held_out(self, k: int, v: int) -> Row | None:
        """S[k,v] - P[k,v] >= 0, for v that is not at t_k."""
        if not self._is_going(k, v) or self._is_at(k, v):
            return None
        return [(1, ("S", k, k, v)), (-1, ("P", k, k, v))], 0

    def held_in(self, k: int, v: int) -> Row | None:
        """S[k,v] - Q[k,v] >= 0."""
        return ([(1, ("S", k, k, v)), (-1, ("Q", k, k, v))], 0) if self._is_coming(k, v) else None

    def begun_out(self, k: int, v: int) -> Row | None:
        """P[k-1,v] + W[k,v] + V[k,v] - P[k,v] >= 0."""
        if not self._is_going(k, v):
            return None
        return [*self._going(k - 1, v), *self._sends(k, v), (-1, ("P", k, k, v))], 0

    def begun_in(self, k: int, v: int) -> Row | None:
        """Q[k-1,v] + B[k,v] - Q[k,v] >= 0."""
        if not self._is_coming(k, v):
            return None
        return [*self._coming(k - 1, v), *self._fetches(k, v), (-1, ("Q", k, k, v))], 0

    def single_out(self, k: int) -> Row | None:
        """Sum of P[k,v] <= 1."""
        return _at_most_one(column for v in range(len(self.producer)) for _, column in self._going(k, v))

    def single_in(self, k: int) -> Row | None:
        """Sum of Q[k,v] <= 1."""
        return _at_most_one(column for v in range(len(self.producer)) for _, column in self._coming(k, v))

    def release(self, j: int, e: int) -> Row | None:
        """T[j] - first runs up to e in stretch j - d (W[j,v] + V[j,v] - P[j,v]) >= 0, v first made at e or later."""
        if not 0 <= j <= self.K or not self._first(j) <= e <= self._last(j):
            return None
        terms, constant = self._duration(j)
        for v, d in enumerate(self.out_ns):
            if self.producer[v] >= e:
                terms += [(-d * factor, column) for factor, column in self._sends(j, v)]
                terms += [(d * factor, column) for factor, column in self._going(j, v)]
        return terms, self.begins[e + 1] - self.begins[self._first(j)] - constant

    def arrival_run(self, j: int, i: int, v: int) -> Row | None:
        """T[j] - cost of t_j - c R[j-1,j-1,i] - d (Q[j-1,v] + R[j-1,j-1,i] - 1) >= 0, operation i reads v."""
        if not 1 <= j < self.K or not self._can_run(j - 1, i) or not self._is_coming(j - 1, v):
            return None
        if v not in self.reads[i]:
            return None
        terms, constant = self._duration(j)
        d, cost = self.in_ns[v], self.graph.operations[i].cost
        terms += [(-d, ("Q", j - 1, j - 1, v)), (-d - cost, ("R", j - 1, j - 1, i))]
        return terms, self._own_cost(j) - d - constant

    def host(self, k: int) -> Row | None:
        """The bytes of all H[k,v] fit on the host."""
        if self.host_bytes is None or not 0 <= k < self.K:
            return None
        held = [v for v in range(len(self.producer)) if self._is_on_host(k, v)]
        return [(-self.graph.values[v].bytes, ("H", k, k, v)) for v in held], -self.host_bytes

    def stayed(self, k: int, v: int) -> Row | None:
        """H[k-1,v] + W[k,v] + V[k,v] - H[k,v] >= 0."""
        if not self._is_on_host(k, v):
            return None
        return [*self._on_host(k - 1, v), *self._sends(k, v), (-1, ("H", k, k, v))], 0

    def sent(self, j: int, v: int) -> Row | None:
        """H[j-1,v] + W[j,v] + V[j,v] - B[j,v] >= 0."""
        if self.host_bytes is None or not self._may_come(j, v):
            return None
        return [*self._on_host(j - 1, v), *self._sends(j, v), (-1, ("B", j, j, v))], 0

    def again(self, j: int, v: int) -> Row | None:
        """S[j-1,v] + R[j-1,j-1,p] + B[j,v] - V[j,v] >= 0, for v that is not at t_(j-1)."""
        if not self._may_go_again(j, v) or not self._can_lack(j - 1, v):
            return None
        return [*self._provided(j - 1, j - 1, v), *self._fetches(j, v), (-1, ("V", j, j, v))], 0

    def _first(self, j: int) -> int:
        """The first operation that first runs in stretch j."""
        return 0 if j == 0 else self.done[j - 1] + 1

    def _last(self, j: int) -> int:
        """The last one."""
        return len(self.graph) - 1 if j == self.K else self.done[j]

    def _own_cost(self, j: int) -> int:
        """How long the operation of boundary j runs before the snapshot; 0 at its start."""
        return self.graph.operations[self.t[j]].cost if self.done[j] == self.t[j] else 0

    def _duration(self, j: int) -> tuple[Terms, int]:
        """(terms, constant) of T[j]."""
        runs: Terms = []
        if j > 0:
            runs = [
                (op.cost, ("R", j - 1, j - 1, i))
                for i, op in enumerate(self.graph.operations)
                if self._can_run(j - 1, i)
            ]
        return [(self.idle, ("Z", j, j, 0)), *runs], self.begins[self._last(j) + 1] - self.begins[self._first(j)]

    def _with_copies(self, row: Row | None, k: int, m: int, v: int, last: str) -> Row | None:
        if row is None:
            return None
        come: Terms = [(1, ("B" if j <= m else last, j, j, v)) for j in range(k + 1, m + 2) if self._may_come(j, v)]
        return [*row[0], *come], row[1]

    def _with_out(self, row: Row | None, k: int, v: int) -> Row | None:
        if row is None:
            return None
        under_way: Terms = [(-1, column) for _, column in self._going(k, v)]
        return [*row[0], *self._outs(v, 0, k), *under_way], row[1]

    def _outs(self, v: int, first: int, last: int) -> Terms:
        return [(1, ("W", j, j, v)) for j in range(first, last + 1) if self._may_go(j, v)]

    def _may_go(self, j: int, v: int) -> bool:
        """Whether W[j,v] has a column."""
        return 0 <= j <= self.K and 0 <= v < len(self.producer) and (j == self.K or self.producer[v] < self.t[j])

    def _may_go_again(self, j: int, v: int) -> bool:
        """Whether V[j,v] has a column."""
        is_place = self.host_bytes is not None and 1 <= j <= self.K and 0 <= v < len(self.producer)
        return is_place and self._may_go(j, v) and self.producer[v] <= self.done[j - 1]

    def _sends(self, j: int, v: int) -> Terms:
        """W[j,v] + V[j,v]."""
        return [(1, (kind, j, j, v)) for kind, may in (("W", self._may_go), ("V", self._may_go_again)) if may(j, v)]

    def _fetches(self, j: int, v: int) -> Terms:
        """B[j,v]."""
        return [(1, ("B", j, j, v))] if self._may_come(j, v) else []

    def _is_going(self, k: int, v: int) -> bool:
        """Whether P[k,v] has a column."""
        if not 0 <= k < self.K or not 0 <= v < len(self.producer) or self.producer[v] >= self.t[k]:
            return False
        return self._is_at(k, v) or self._is_held(k, v)

    def _is_coming(self, k: int, v: int) -> bool:
        """Whether Q[k,v] has a column."""
        return 1 <= k < self.K and 0 <= v < len(self.producer) and self._is_held(k, v)

    def _going(self, k: int, v: int) -> Terms:
        return [(1, ("P", k, k, v))] if self._is_going(k, v) else []

    def _coming(self, k: int, v: int) -> Terms:
        return [(1, ("Q", k, k, v))] if self._is_coming(k, v) else []

    def _is_on_host(self, k: int, v: int) -> bool:
        """Whether H[k,v] has a column."""
        is_place = self.host_bytes is not None and 0 <= k < self.K and 0 <= v < len(self.producer)
        return is_place and self.producer[v] < self.t[k]

    def _on_host(self, k: int, v: int) -> Terms:
        return [(1, ("H", k, k, v))] if self._is_on_host(k, v) else []

    def _may_come(self, j: int, v: int) -> bool:
        """Whether B[j,v] and A[j,v] have columns."""
        is_place = 1 <= j <= self.K and 0 <= v < len(self.producer)
        return is_place and self.producer[v] <= self.done[j - 1] and bool(self.wanted[v] >> j - 1 & 1)


def _at_most_one(columns: Iterable[Column]) -> Row | None:
    """The row "the sum of these columns is at most 1"; None without a column."""
    terms: Terms = [(-1, column) for column in columns]
    return (terms, -1) if terms else None


def within(room: int, terms: Terms) -> Row:
    """The row "these bytes are within the room", which is rounded down to a multiple of their common divisor."""
    unit = math.gcd(*(size for size, _ in terms))
    return [(-size, column) for size, column in terms], -(room - (room % unit if unit else 0))
