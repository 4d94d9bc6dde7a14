"""The window relaxation with copies to the host: what `remat.programs.windows` says, and the rows of three streams.

Take any execution of a plan over a link, with what is on the device at each moment: an output from the start of its
run, a fetched value from the start of its copy, until it is given back. The order of a plan's steps allows no more
memory than these moments, so that a bound for them holds for plans. Runs and copies that serve nothing are left out,
and only the first copy of a value to the host counts: host copies are alike.

Snapshot k is the end of the first run of t_k. Stretch j lies between the snapshots j - 1 and j; stretch 0 ends at the
first one, stretch K with the plan. Interval k of the windows is stretch k + 1. (Other snapshots: see below.) More
columns:

- B[j,v], j >= 1, for v first made at or before t_(j-1): a copy of v from the host begins in stretch j.
- A[j,v]: such a copy is read in stretch j, too, or kept at the end.
- W[j,v]: the first copy of v to the host begins in stretch j.
- P[k,v], for v made before t_k: the share of a copy of v to the host that is still to come at snapshot k.
- Q[k,v], k >= 1, for v that is not at t_k: the same of a copy from the host.
- Z[j]: how long the computations are idle in stretch j, in units of `idle_unit`.

S[k,v] is 1, too, where a copy of v to the host is under way at snapshot k, because the copy reads v.

The duration T[j] of stretch j is the cost of its first runs, the sum of c R[j-1,j-1,i], and idle_unit Z[j]. Rows, for
the window k..m of intervals, with p the producer of v, d how long a copy lasts, and OUT[k,v] the sum of W[j,v] for
j <= k:

- NEED, EDGE and CONTINUITY get the sum of B[j,v] for the stretches j of the window: the copy that is read, or held,
  was there at snapshot k, was made in the window, or a copy from the host began in it. In the last stretch of the
  window NEED and EDGE get A in place of B: who reads the copy does so in the window.
- NEED_OUT, EDGE_OUT, CONTINUITY_OUT are the same rows with OUT[k,v] - P[k,v] in place of B and A. Suppose that v is
  neither held at snapshot k nor made in the window. The first copy from the host in the window needs one on the host.
  Had that copy begun after snapshot k, its source on the device would be held at snapshot k, made in the window, or
  fetched before. So OUT[k,v] is 1, and P[k,v] is 0 because v is not held. If P[k,v] is not 0, then both S[k,v] and
  OUT[k,v] are 1. (Without P, half of a value that is held and the other half under way count as two halves.)
- OUT: sum of W[i,v] for i <= j - B[j,v] >= 0. SOURCE: S[k,v] + R[k,m,p] - (sum of W[j,v] over the window) >= 0, for v
  that is not at t_k: the first copy to the host needs v on the device, which no copy from the host can have brought.
  ONE: the sum of W[j,v] over all j is at most 1. ARRIVED: B[j,v] - A[j,v] >= 0.
- HELD_OUT: S[k,v] - P[k,v] >= 0, for v that is not at t_k. BEGUN_OUT: P[k-1,v] + W[k,v] - P[k,v] >= 0: a copy that is
  under way began before, and less of it is to come than before. SINGLE_OUT: the sum of P[k,v] is at most 1, because
  one copy is under way at a time. HELD_IN, BEGUN_IN and SINGLE_IN say the same of Q and B.
- STREAM_OUT: T[j] - (sum of d W[j,v]) - (sum of d P[j-1,v]) + (sum of d P[j,v]) >= 0: copies to the host follow each
  other. STREAM_IN: the same of B and Q, for j >= 1.
- RELEASE, for an operation e that first runs in stretch j: the copies to the host that begin in the stretch, of values
  first made at e or later, begin after e ends: T[j] - (costs of the first runs up to e in the stretch) -
  (sum of d (W[j,v] - P[j,v]) over these v) >= 0.
- ARRIVAL, 1 <= j < K: T[j] - cost of t_j - (sum of d A[j,v]) - (sum of d Q[j-1,v]) >= 0, with the Q of values that
  first runs in stretch j read: what is read in stretch j is there before t_j starts, and this much of the copies is
  still to come when the stretch begins. ARRIVAL_RUN, for a value v that an operation i reads: T[j] - cost of t_j -
  c R[j-1,j-1,i] - d (Q[j-1,v] + R[j-1,j-1,i] - 1) >= 0: if i runs again in the stretch, it runs between the arrival of
  v and the start of t_j.
- DEADLINE, for an operation e that first runs in the window: of the values that first runs after t_k up to e read,
  and that were made at or before t_k and are not at t_k, those that are neither held at snapshot k nor made in the
  window arrive between snapshot k and the start of e, and the rest of one that is on its way does, too: sum of T[j]
  over the window - (costs of the first runs from e on in it) - (sum of d (1 - S[k,v] - R[k,m,p] + Q[k,v])) >= 0. If
  Q[k,v] is not 0, S[k,v] is 1.

Of RELEASE, ARRIVAL_RUN and DEADLINE there are too many. Those that a point misses most enter on demand.

**Snapshots at the start of an operation.** A copy may end while t_k runs, so that its value is not held at the end.
A boundary -t, for t >= 1, therefore stands for the start of the first run of t; it comes before the boundary t. Let
o_k be the last operation whose first run has ended at snapshot k: t_k at an end, t_k - 1 at a start.

1. Whatever is said above and in `remat.programs.windows` of operations that first run, or values first made, at or
   before t_k, or after it, is said of o_k at a start. The arguments compare moments with the snapshot only. The first
   runs of stretch j are those after o_(j-1) up to o_j. "Made before t_k" is the same on both sides: v is made then, and
   a copy of it to the host may have begun.
2. MEMORY and KNAPSACK: when t_k begins, its inputs, outputs and workspace take their bytes, beside all that is held.
   Its inputs are whole, so that they have no S and no Q, and no rows ask for them; its outputs are not made yet.
3. NEED and DEADLINE: the inputs of t_(m+1) are there at snapshot m+1 on both sides, because it has begun. So the
   readers in a window are the operations after o_k up to t_(m+1), and e may be t_(m+1).
4. A[j,v] is 1, too, if t_j reads at its start what came in stretch j. ARRIVAL at a start: all that is counted is there
   when stretch j ends, without the cost of t_j; Q counts for what is read up to t_j. ARRIVAL_RUN: the repeat has ended
   by then, without the cost of t_j.

**With a capacity of the host** a value may be copied to it several times. W still counts the first copy. More columns:

- V[j,v], j >= 1, for v made at or before t_(j-1): a later copy of v to the host begins in stretch j. It is added to W
  in STREAM_OUT, BEGUN_OUT and RELEASE, and in no other row above: those speak of the first copy only.
- H[k,v], for v made before t_k: v is on the host at snapshot k, or on its way to it, and is fetched later.

HOST: the bytes of all H[k,v] fit. STAYED: H[k-1,v] + W[k,v] + V[k,v] - H[k,v] >= 0; SENT: H[j-1,v] + W[j,v] +
V[j,v] - B[j,v] >= 0: what is on the host, or fetched, was there before or is copied in the stretch. AGAIN: S[j-1,v] +
R[j-1,j-1,p] + B[j,v] - V[j,v] >= 0, for v that is not at t_(j-1): a copy needs v on the device.

The objective adds idle_unit Z[j]. A plan that is idle for longer than `idle_unit` in a stretch costs more than that,
so that the bound is at most `idle_unit`. Scope staged and fixed_order only, without implementations. In a tree, all
columns but P, Q and Z may be branched on, and fixed by their reduced costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property

import numpy as np

from remat.graph import Graph
from remat.link import Link
from remat.programs.program import Rows
from remat.programs.windows import Arrays, Builder, Kind, WindowModel

OUT_KINDS = {Kind.NEED: Kind.NEED_OUT, Kind.EDGE: Kind.EDGE_OUT, Kind.CONTINUITY: Kind.CONTINUITY_OUT}
ON_DEMAND = (Kind.DEADLINE, Kind.RELEASE, Kind.ARRIVAL_RUN)
MISSED = 1e-6  # share of the cost by which a point must miss a row for it to enter

TimeRow = tuple[list[tuple[int, int]], int, int, tuple[int, int, int, int]]  # terms, lower, kind, key


def idle_unit(graph: Graph, link: Link) -> int:
    """More than any plan costs that copies each value out and in once, one after the other."""
    return graph.total_cost + sum(link.out_ns(value.bytes) + link.in_ns(value.bytes) for value in graph.values) + 1


def build_link_model(
    arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]], link: Link
) -> LinkModel:  # fmt: skip
    """`remat.programs.windows.build_window_model` with copies over a link."""
    return _LinkBuilder(arrays, budget_bytes, boundaries, windows, link).model()


@dataclass(frozen=True, eq=False)
class LinkModel(WindowModel):
    """The relaxation with copies; `copies` has its columns, and the rows that enter on demand."""

    copies: _LinkBuilder = field(kw_only=True)

    @property
    def is_a_plan(self) -> bool:
        """No point says how the copies follow each other."""
        return False

    @cached_property
    def is_whole(self) -> np.ndarray:
        """[n] whether every plan has 0 or 1 in the column; a share of a copy and an idle time may be anything."""
        whole = np.full(len(self.cost), True)
        for columns in (*self.copies.P, *self.copies.Q, self.copies.Z):
            whole[columns[columns >= 0]] = False
        return whole

    @cached_property
    def columns(self) -> list[tuple[str, int, int, int]]:
        """[n] names as in `WindowModel`; ("A", j, j, v), and so for B, W, V, H, P and Q; ("Z", j, j, 0)."""
        names, c = super().columns, self.copies
        for kind, several in (("A", c.A), ("B", c.B), ("W", c.W), ("V", c.V), ("H", c.H), ("P", c.P), ("Q", c.Q)):
            for j, columns in enumerate(several):
                for v in np.nonzero(columns >= 0)[0].tolist():
                    names[columns[v]] = (kind, j, j, v)
        for j, column in enumerate(c.Z.tolist()):
            names[column] = ("Z", j, j, 0)
        return names

    def with_missed(self, x: np.ndarray) -> LinkModel:
        here = np.isin(self.row_kind, ON_DEMAND)
        known = set(map(tuple, np.column_stack([self.row_kind, self.row_key])[here].tolist()))
        rows = Rows()
        for row in self.copies.missed(x):
            if (row[2], *row[3]) not in known:
                rows.add(*row)
        return self.with_rows(rows) if rows.lower else self


class _LinkBuilder(Builder):
    def __init__(
        self, arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]],
        link: Link,
    ) -> None:  # fmt: skip
        values = arrays.graph.values
        self.out_ns = np.array([link.out_ns(v.bytes) for v in values], dtype=np.int64)
        self.in_ns = np.array([link.in_ns(v.bytes) for v in values], dtype=np.int64)
        self.host_bytes = link.host_bytes
        self.idle = idle_unit(arrays.graph, link)
        self.begins = np.concatenate([[0], np.cumsum(arrays.cost)])  # of first runs, if nothing else runs
        super().__init__(arrays, budget_bytes, boundaries, windows)

    def model(self) -> LinkModel:
        plain = super().model()
        return LinkModel(**{each.name: getattr(plain, each.name) for each in fields(plain)}, copies=self)

    def _copy_columns(self) -> None:
        a = self.arrays
        none = np.full(len(a.size), -1, dtype=np.int64)
        self.B, self.A, self.W = [none], [none], list[np.ndarray]()
        for t, done in zip(self.t.tolist(), self.done.tolist(), strict=True):
            may_come = (a.producer <= done) & a.serving_after(done)
            self.B.append(self._made(may_come))
            self.A.append(self._made(may_come))
            self.W.append(self._made(a.producer < t))
        self.W.append(self._made(np.full(len(a.size), True)))
        self.Z = self._made(np.full(self.K + 1, True))
        self.cost[-1] = np.full(self.K + 1, self.idle, dtype=np.int64)
        is_held = self.S >= 0
        self.P = [self._made((a.producer < t) & (is_held[k] | self.is_there[k])) for k, t in enumerate(self.t)]
        self.Q = [self._made(is_held[k] & (k > 0)) for k in range(self.K)]
        has_limit = self.host_bytes is not None
        self.H = [self._made((a.producer < t) & has_limit) for t in self.t]
        after = zip(self.done, self.W[1:], strict=True)
        self.V = [none, *(self._made((W >= 0) & (a.producer <= t) & has_limit) for t, W in after)]

    def _made(self, where: np.ndarray) -> np.ndarray:
        columns = np.full(len(where), -1, dtype=np.int64)
        self._new(columns, where, None)
        return columns

    def _provided(self, k: int, m: int, v: np.ndarray, *, is_read: bool = True) -> list[tuple[np.ndarray, int]]:
        last = self.A if is_read else self.B
        come = [(self.B[j][v], 1) for j in range(k + 1, m + 1)] + [(last[m + 1][v], 1)]
        return super()._provided(k, m, v) + come

    def _add(
        self, kind: int, terms: Sequence[tuple[np.ndarray, int]], lower: int, key: tuple[int, int], *names: np.ndarray
    ) -> None:
        super()._add(kind, terms, lower, key, *names)
        if kind not in OUT_KINDS:
            return
        k, v = key[0], names[-1]
        others = [term for term in terms if term[1] < 0]  # what is read or held
        provided = super()._provided(k, key[1], v)
        out = [*((self.W[j][v], 1) for j in range(k + 1)), (self.P[k][v], -1)]
        super()._add(OUT_KINDS[kind], [*provided, *out, *others], lower, key, *names)

    def _copy_rows(self) -> None:
        values = np.arange(len(self.arrays.size))
        for j in range(1, self.K + 1):
            v = np.nonzero(self.B[j] >= 0)[0]
            outs = [(self.W[i][v], 1) for i in range(j + 1)]
            self._add_keyed(Kind.OUT, [*outs, (self.B[j][v], -1)], 0, j, v)
            self._add_keyed(Kind.ARRIVED, [(self.B[j][v], 1), (self.A[j][v], -1)], 0, j, v)
        self._add_keyed(Kind.ONE, [(column, -1) for column in self.W], -1, 0, values)
        for k, m in self.windows:
            v = np.nonzero(self._old(k))[0]
            terms = [*super()._provided(k, m, v), *((self.W[j][v], -1) for j in range(k + 1, m + 2))]
            self._add(Kind.SOURCE, terms, 0, (k, m), v)
            if (row := self.deadline(k, m, self._last_reader(m))) is not None:
                self.rows.add(*row)
        for j in range(self.K + 1):
            self._streams(j)
        for k in range(self.K):
            self._flights(k, self.P, (self.W, self.V), (Kind.HELD_OUT, Kind.BEGUN_OUT, Kind.SINGLE_OUT))
            self._flights(k, self.Q, (self.B,), (Kind.HELD_IN, Kind.BEGUN_IN, Kind.SINGLE_IN))
        if self.host_bytes is not None:
            self._host_rows(self.host_bytes)

    def _flights(
        self, k: int, flight: Sequence[np.ndarray], begin: Sequence[Sequence[np.ndarray]], kinds: tuple[int, int, int]
    ) -> None:
        """HELD, BEGUN and SINGLE of one direction at snapshot k."""
        held, begun, single = kinds
        v = np.nonzero(flight[k] >= 0)[0]
        before = [(flight[k - 1][v], 1)] if k else []
        self._add_keyed(begun, [*before, *((copies[k][v], 1) for copies in begin), (flight[k][v], -1)], 0, k, v)
        if len(v):
            self.rows.add([(column, -1) for column in flight[k][v].tolist()], -1, single, (k, -1, -1, -1))
        v = v[~self.is_there[k, v]]
        self._add_keyed(held, [(self.S[k][v], 1), (flight[k][v], -1)], 0, k, v)

    def _host_rows(self, host_bytes: int) -> None:
        """HOST, STAYED, SENT and AGAIN."""
        a = self.arrays
        for k in range(self.K + 1):
            before = [] if k == 0 else [(self.H[k - 1], 1)]
            begun = [*before, (self.W[k], 1), (self.V[k], 1)]
            if k < self.K:
                v = np.nonzero(self.H[k] >= 0)[0]
                terms = list(zip(self.H[k][v].tolist(), (-a.size[v]).tolist(), strict=True))
                self.rows.add(terms, -host_bytes, Kind.HOST, (k, -1, -1, -1))
                self._add_keyed(Kind.STAYED, [*begun, (self.H[k], -1)], 0, k, v)
            if k > 0:
                v = np.nonzero(self.B[k] >= 0)[0]
                self._add_keyed(Kind.SENT, [*begun, (self.B[k], -1)], 0, k, v)
                v = np.nonzero((self.V[k] >= 0) & ~self.is_there[k - 1])[0]
                there = [*super()._provided(k - 1, k - 1, v), (self.B[k][v], 1)]
                self._add_keyed(Kind.AGAIN, [*there, (self.V[k][v], -1)], 0, k, v)

    def _add_keyed(self, kind: int, terms: Sequence[tuple[np.ndarray, int]], lower: int, j: int, v: np.ndarray) -> None:
        keys = np.full((len(v), 4), -1, dtype=np.int64)
        keys[:, 0], keys[:, 1] = j, v
        self.rows.add_each(
            [(columns if len(columns) == len(v) else columns[v], f) for columns, f in terms], lower, kind, keys
        )

    def _old(self, k: int) -> np.ndarray:
        """[V] whether a value was made at or before t_k, and may be missing there."""
        return (self.arrays.producer <= self.done[k]) & ~self.is_there[k]

    def _end(self, m: int) -> int:
        """The last operation that first runs in interval m."""
        return len(self.arrays.cost) - 1 if m + 1 == self.K else int(self.done[m + 1])

    def _last_reader(self, m: int) -> int:
        """The last operation whose inputs are needed in interval m."""
        return len(self.arrays.cost) - 1 if m + 1 == self.K else int(self.t[m + 1])

    def _own_cost(self, j: int) -> int:
        """How long the operation of snapshot j runs before it."""
        return int(self.arrays.cost[self.t[j]]) if self.done[j] == self.t[j] else 0

    def _first(self, j: int) -> int:
        """The first operation that first runs in stretch j."""
        return 0 if j == 0 else int(self.done[j - 1]) + 1

    def _duration(self, j: int) -> tuple[list[tuple[int, int]], int]:
        """(terms, constant) of T[j]."""
        terms = [(int(self.Z[j]), self.idle)]
        if j > 0:
            R = self.R[j - 1, j - 1]
            terms += weighted(R, self.arrays.cost)
        return terms, int(self.begins[self._end(j - 1) + 1] - self.begins[self._first(j)])

    def _streams(self, j: int) -> None:
        terms, constant = self._duration(j)
        key = (j, -1, -1, -1)
        for kind, begun, flight, lasts in (
            (Kind.STREAM_OUT, (self.W[j], self.V[j]), self.P, self.out_ns),
            (Kind.STREAM_IN, (self.B[j],), self.Q, self.in_ns),
        ):
            if kind == Kind.STREAM_IN and j == 0:
                continue
            rest = [] if j == 0 else weighted(flight[j - 1], -lasts)
            after = [] if j == self.K else weighted(flight[j], lasts)
            copies = [term for columns in begun for term in weighted(columns, -lasts)]
            self.rows.add([*terms, *copies, *rest, *after], -constant, kind, key)
        if 1 <= j < self.K:
            is_read = self.first_use[j - 1] <= self.t[j]
            come = [*weighted(self.A[j], -self.in_ns), *weighted(np.where(is_read, self.Q[j - 1], -1), -self.in_ns)]
            self.rows.add([*terms, *come], self._own_cost(j) - constant, Kind.ARRIVAL, key)

    @cached_property
    def first_use(self) -> np.ndarray:
        """[K, V] the first operation after t_k that reads a value; N if there is none."""
        a = self.arrays
        found = np.full((self.K, len(a.size)), len(a.cost), dtype=np.int64)
        for k, t in enumerate(self.done):
            later = a.reader > t
            np.minimum.at(found[k], a.read[later], a.reader[later])
        return found

    def deadline(self, k: int, m: int, e: int) -> TimeRow | None:
        """DEADLINE; None if nothing is due."""
        v = np.nonzero(self._old(k) & (self.first_use[k] <= e))[0]
        if not len(v):
            return None
        terms = [term for j in range(k + 1, m + 2) for term in self._duration(j)[0]]
        lasts = self.in_ns[v]
        for columns, factor in (*super()._provided(k, m, v), (self.Q[k][v], -1)):
            terms += weighted(columns, factor * lasts)
        time = int(self.begins[e] - self.begins[self.done[k] + 1])
        return terms, int(lasts.sum()) - time, Kind.DEADLINE, (k, m, e, -1)

    def release(self, j: int, e: int) -> TimeRow:
        """RELEASE."""
        terms, constant = self._duration(j)
        late = self.arrays.producer >= e
        for columns, factor in ((self.W[j], -1), (self.V[j], -1), *([(self.P[j], 1)] if j < self.K else [])):
            terms += weighted(np.where(late, columns, -1), factor * self.out_ns)
        return terms, int(self.begins[e + 1] - self.begins[self._first(j)]) - constant, Kind.RELEASE, (j, e, -1, -1)

    def arrival_run(self, j: int, i: int, v: int) -> TimeRow:
        """ARRIVAL_RUN."""
        terms, constant = self._duration(j)
        lasts, cost = int(self.in_ns[v]), self.arrays.cost
        terms += [(int(self.Q[j - 1][v]), -lasts), (int(self.R[j - 1, j - 1][i]), -lasts - int(cost[i]))]
        return terms, self._own_cost(j) - lasts - constant, Kind.ARRIVAL_RUN, (j, i, v, -1)

    def missed(self, x: np.ndarray) -> list[TimeRow]:
        """Rows DEADLINE, RELEASE and ARRIVAL_RUN that the point x [n] misses most, one for each window or stretch."""
        durations = map(self._duration, range(self.K + 1))
        lasts = np.array([constant + sum(factor * x[column] for column, factor in of) for of, constant in durations])
        until = np.concatenate([[0.0], np.cumsum(lasts)])
        least = MISSED * float(self.arrays.cost.sum())
        found = []
        for k, m in self.windows:
            e, amount = self._worst_deadline(k, m, x, until[m + 2] - until[k + 1])
            row = self.deadline(k, m, e) if amount > least else None
            found += [row] if row is not None else []
        for j in range(self.K + 1):
            e, amount = self._worst_release(j, x, lasts[j])
            found += [self.release(j, e)] if amount > least else []
            if 2 <= j < self.K:
                i, v, amount = self._worst_run(j, x, lasts[j] - self._own_cost(j))
                found += [self.arrival_run(j, i, v)] if amount > least else []
        return found

    def _worst_deadline(self, k: int, m: int, x: np.ndarray, lasts: float) -> tuple[int, float]:
        """(operation, by how much its row is missed)."""
        first_use = self.first_use[k]
        v = np.nonzero(self._old(k) & (first_use <= self._last_reader(m)))[0]
        if not len(v):
            return -1, 0.0
        v = v[np.argsort(first_use[v], kind="stable")]
        there = sum(values_at(columns, x) for columns, _ in super()._provided(k, m, v))
        come = np.cumsum(self.in_ns[v] * (1 - there + values_at(self.Q[k][v], x)))
        e = first_use[v]
        return _latest(e, come - (lasts - (self.begins[self._end(m) + 1] - self.begins[e])))

    def _worst_release(self, j: int, x: np.ndarray, lasts: float) -> tuple[int, float]:
        a = self.arrays
        v = np.nonzero((self.W[j] >= 0) & (a.producer >= self._first(j)))[0]
        if not len(v):
            return -1, 0.0
        v = v[np.argsort(-a.producer[v], kind="stable")]
        sent = values_at(self.W[j][v], x) + values_at(self.V[j][v], x)
        if j < self.K:
            sent -= values_at(self.P[j][v], x)
        e = a.producer[v]
        due = lasts - (self.begins[e + 1] - self.begins[self._first(j)])
        return _latest(e, np.cumsum(self.out_ns[v] * sent) - due)

    def _worst_run(self, j: int, x: np.ndarray, lasts: float) -> tuple[int, int, float]:
        a, R = self.arrays, self.R[j - 1, j - 1]
        pairs = np.nonzero((R[a.reader] >= 0) & (self.Q[j - 1][a.read] >= 0))[0]
        if not len(pairs):
            return -1, -1, 0.0
        i, v = a.reader[pairs], a.read[pairs]
        again = x[R[i]]
        late = self.in_ns[v] * (x[self.Q[j - 1][v]] + again - 1) + a.cost[i] * again - lasts
        worst = int(np.argmax(late))
        return int(i[worst]), int(v[worst]), float(late[worst])


def _latest(e: np.ndarray, late: np.ndarray) -> tuple[int, float]:
    """(operation, its amount): the largest of cumulative amounts, which are complete at the last entry of each."""
    late[np.append(e[1:] == e[:-1], False)] = -np.inf
    worst = int(np.argmax(late))
    return int(e[worst]), float(late[worst])


def weighted(columns: np.ndarray, factors: np.ndarray) -> list[tuple[int, int]]:
    """(column, factor) for each column that exists."""
    there = columns >= 0
    return list(zip(columns[there].tolist(), factors[there].tolist(), strict=True))


def values_at(columns: np.ndarray, x: np.ndarray) -> np.ndarray:
    """[len(columns)] value of each column in the point x [n], 0 where there is none."""
    return np.append(x, 0.0)[columns]
