"""The window relaxation with copies to the host: what `remat.programs.windows` says, and the rows of three streams.

Take any execution of a plan over a link, with what is on the device at each moment: an output from the start of its
run, a fetched value from the start of its copy, until it is given back. The order of a plan's steps allows no more
memory than these moments, so that a bound for them holds for plans. Runs and copies that serve nothing are left out,
and only the first copy of a value to the host counts: host copies are alike.

Snapshot k is the end of the first run of t_k. Stretch j lies between the snapshots j - 1 and j; stretch 0 ends at the
first one, stretch K with the plan. Interval k of the windows is stretch k + 1. More columns:

- B[j,v], j >= 1, for v first made at or before t_(j-1): a copy of v from the host begins in stretch j.
- A[j,v]: such a copy is read in stretch j, too, or kept at the end.
- W[j,v]: the first copy of v to the host begins in stretch j.
- Z[j]: how long the computations are idle in stretch j, in units of `idle_unit`.
- P[k], Q[k]: what is still to come at snapshot k of a copy to the host, and from it, in units of the longest one.

The duration T[j] of stretch j is the cost of its first runs, the sum of c R[j-1,j-1,i], and idle_unit Z[j]. Rows, for
the window k..m of intervals, with p the producer of v and OUT[k,v] the sum of W[j,v] for j <= k:

- NEED, EDGE and CONTINUITY get the sum of B[j,v] for the stretches j of the window: the copy that is read, or held,
  was there at snapshot k, was made in the window, or a copy from the host began in it. In the last stretch of the
  window NEED and EDGE get A in place of B: who reads the copy does so in the window.
- NEED_OUT, EDGE_OUT, CONTINUITY_OUT are the same rows with OUT[k,v] in place of B and A. Suppose that v is neither
  held at snapshot k nor made in the window. The first copy from the host in the window needs one on the host. Had
  that copy begun after snapshot k, its source on the device would be held at snapshot k, made in the window, or
  fetched before.
- OUT: sum of W[i,v] for i <= j - B[j,v] >= 0. SOURCE: S[k,v] + R[k,m,p] - (sum of W[j,v] over the window) >= 0, for v
  that is not at t_k: the first copy to the host needs v on the device, which no copy from the host can have brought.
  ONE: the sum of W[j,v] over all j is at most 1. ARRIVED: B[j,v] - A[j,v] >= 0.
- STREAM_OUT: T[j] - (sum of d W[j,v]) - most P[j-1] + most P[j] >= 0, d the duration of the copy and most the longest
  one: copies to the host follow each other. STREAM_IN: the same of B and Q, for j >= 1; Q[0] is left out.
- ARRIVAL, 1 <= j < K: T[j] - cost of t_j - (sum of d A[j,v]) >= 0: what is read in stretch j is there before t_j
  starts, and the copy began in stretch j.
- DEADLINE, for an operation e that first runs in the window: of the values that first runs after t_k up to e read,
  and that were made at or before t_k and are not at t_k, those that are neither held at snapshot k nor made in the
  window arrive between snapshot k and the start of e: sum of T[j] over the window - (costs of the first runs from e
  on in it) - (sum of d (1 - S[k,v] - R[k,m,p])) >= 0.

The objective adds idle_unit Z[j]. A plan that is idle for longer than `idle_unit` in a stretch costs more than that,
so that the bound is at most `idle_unit`. Scope staged and fixed_order only, without implementations; the host's
capacity is left out, which only enlarges the relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from remat.graph import Graph
from remat.link import Link
from remat.programs.windows import (
    ARRIVAL,
    ARRIVED,
    CONTINUITY,
    CONTINUITY_OUT,
    DEADLINE,
    EDGE,
    EDGE_OUT,
    NEED,
    NEED_OUT,
    ONE,
    OUT,
    SOURCE,
    STREAM_IN,
    STREAM_OUT,
    Arrays,
    Builder,
    WindowModel,
)  # fmt: skip

OUT_KINDS = {NEED: NEED_OUT, EDGE: EDGE_OUT, CONTINUITY: CONTINUITY_OUT}
MOST_DEADLINES = 6  # in a window of one interval, besides its end


def idle_unit(graph: Graph, link: Link) -> int:
    """More than any plan costs that copies each value out and in once, one after the other."""
    return graph.total_cost + sum(link.out_ns(value.bytes) + link.in_ns(value.bytes) for value in graph.values) + 1


def build_link_model(
    arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]], link: Link
) -> WindowModel:  # fmt: skip
    """`remat.programs.windows.build_window_model` with copies over a link."""
    return _LinkBuilder(arrays, budget_bytes, boundaries, windows, link).model()


class _LinkBuilder(Builder):
    def __init__(
        self, arrays: Arrays, budget_bytes: int, boundaries: Sequence[int], windows: Sequence[tuple[int, int]],
        link: Link,
    ) -> None:  # fmt: skip
        values = arrays.graph.values
        self.out_ns = np.array([link.out_ns(v.bytes) for v in values], dtype=np.int64)
        self.in_ns = np.array([link.in_ns(v.bytes) for v in values], dtype=np.int64)
        self.idle = idle_unit(arrays.graph, link)
        self.begins = np.concatenate([[0], np.cumsum(arrays.cost)])  # of first runs, if nothing else runs
        super().__init__(arrays, budget_bytes, boundaries, windows)

    def _copy_columns(self) -> None:
        a = self.arrays
        none = np.full(len(a.size), -1, dtype=np.int64)
        self.B.append(none)
        self.A, self.W = [none], list[np.ndarray]()
        for t in self.t.tolist():
            may_come = (a.producer <= t) & a.serving_after(t)
            self.B.append(self._made(may_come))
            self.A.append(self._made(may_come))
            self.W.append(self._made(a.producer < t))
        self.W.append(self._made(np.full(len(a.size), True)))
        self.Z, self.P, self.Q = (self._made(np.full(n, True)) for n in (self.K + 1, self.K, self.K))
        self.cost[-3] = np.full(self.K + 1, self.idle, dtype=np.int64)

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
        out = [(self.W[j][v], 1) for j in range(k + 1)]
        super()._add(OUT_KINDS[kind], [*provided, *out, *others], lower, key, *names)

    def _copy_rows(self) -> None:
        a, values = self.arrays, np.arange(len(self.arrays.size))
        for j in range(1, self.K + 1):
            v = np.nonzero(self.B[j] >= 0)[0]
            outs = [(self.W[i][v], 1) for i in range(j + 1)]
            self._add_keyed(OUT, [*outs, (self.B[j][v], -1)], 0, j, v)
            self._add_keyed(ARRIVED, [(self.B[j][v], 1), (self.A[j][v], -1)], 0, j, v)
        self._add_keyed(ONE, [(column, -1) for column in self.W], -1, 0, values)
        for k, m in self.windows:
            old = (a.producer <= self.t[k]) & ~self.is_there[k]
            v = np.nonzero(old)[0]
            terms = [*super()._provided(k, m, v), *((self.W[j][v], -1) for j in range(k + 1, m + 2))]
            self._add(SOURCE, terms, 0, (k, m), v)
            self._deadlines(k, m, old)
        for j in range(self.K + 1):
            self._streams(j)

    def _add_keyed(self, kind: int, terms: Sequence[tuple[np.ndarray, int]], lower: int, j: int, v: np.ndarray) -> None:
        keys = np.full((len(v), 4), -1, dtype=np.int64)
        keys[:, 0], keys[:, 1] = j, v
        self.rows.add_each(
            [(columns if len(columns) == len(v) else columns[v], f) for columns, f in terms], lower, kind, keys
        )

    def _duration(self, j: int) -> tuple[list[tuple[int, int]], int]:
        """(terms, constant) of T[j]."""
        first = 0 if j == 0 else int(self.t[j - 1]) + 1
        last = len(self.arrays.cost) if j == self.K else int(self.t[j]) + 1
        terms = [(int(self.Z[j]), self.idle)]
        if j > 0:
            R = self.R[j - 1, j - 1]
            terms += [(int(R[i]), int(self.arrays.cost[i])) for i in np.nonzero(R >= 0)[0].tolist()]
        return terms, int(self.begins[last] - self.begins[first])

    def _streams(self, j: int) -> None:
        terms, constant = self._duration(j)
        key = (j, -1, -1, -1)
        for kind, columns, flight, lasts in (
            (STREAM_OUT, self.W[j], self.P, self.out_ns), (STREAM_IN, self.B[j], self.Q, self.in_ns),
        ):  # fmt: skip
            if kind == STREAM_IN and j == 0:
                continue
            most = int(lasts.max(initial=0))
            before = [(int(flight[j - 1]), -most)] if j > (kind == STREAM_IN) else []
            after = [(int(flight[j]), most)] if j < self.K else []
            copies = [(int(columns[v]), -int(lasts[v])) for v in np.nonzero(columns >= 0)[0].tolist()]
            self.rows.add([*terms, *copies, *before, *after], -constant, kind, key)
        if 1 <= j < self.K:
            A = self.A[j]
            come = [(int(A[v]), -int(self.in_ns[v])) for v in np.nonzero(A >= 0)[0].tolist()]
            self.rows.add([*terms, *come], int(self.arrays.cost[self.t[j]]) - constant, ARRIVAL, key)

    def _deadlines(self, k: int, m: int, old: np.ndarray) -> None:
        """DEADLINE of the window at its end; of a single interval at some operations in it, too."""
        a, n = self.arrays, len(self.arrays.cost)
        end = n - 1 if m + 1 == self.K else int(self.t[m + 1])
        first_use = np.full(len(a.size), n, dtype=np.int64)
        later = a.reader > self.t[k]
        np.minimum.at(first_use, a.read[later], a.reader[later])
        uses = np.unique(first_use[old & (first_use <= end)])
        chosen = (
            {end, *uses[np.linspace(0, len(uses) - 1, MOST_DEADLINES).astype(int)].tolist()} if len(uses) else set()
        )
        terms = [term for j in range(k + 1, m + 2) for term in self._duration(j)[0]]
        for e in sorted(chosen) if k == m else sorted(chosen & {end}):
            v = np.nonzero(old & (first_use <= e))[0]
            if not len(v):
                continue
            there = [
                (int(column), int(self.in_ns[value]))
                for columns, _ in super()._provided(k, m, v)
                for column, value in zip(columns.tolist(), v.tolist(), strict=True) if column >= 0
            ]  # fmt: skip
            time = int(self.begins[e] - self.begins[self.t[k] + 1])
            self.rows.add([*terms, *there], int(self.in_ns[v].sum()) - time, DEADLINE, (k, m, e, -1))
