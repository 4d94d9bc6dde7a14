"""What a fractional point of the window relaxation would take at each stage, to choose boundaries by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from remat.programs.link_windows import LinkModel, values_at
from remat.programs.windows import Arrays, WindowModel, place_of

HELD = 1e-3  # below it a fraction of a run is taken for none


@dataclass(frozen=True, slots=True, eq=False)
class _Copies:
    """What is copied in a stretch: [V] shares sent and fetched, and of copies from the host those still to come at its
    start and its end; how long copies last, and the idle time.
    """

    sent: np.ndarray
    fetched: np.ndarray
    rest_before: np.ndarray
    rest_after: np.ndarray
    out_ns: np.ndarray
    in_ns: np.ndarray
    idle: float

    @classmethod
    def of(cls, model: WindowModel, x: np.ndarray, j: int) -> _Copies | None:
        """Of stretch j; None without a link."""
        if not isinstance(model, LinkModel):
            return None
        c = model.copies
        sent = np.minimum(1.0, values_at(c.W[j], x) + values_at(c.V[j], x))
        before, after = (values_at(c.Q[k], x) if 0 <= k < c.K else np.zeros_like(sent) for k in (j - 1, j))
        return cls(sent, values_at(c.B[j], x), before, after, c.out_ns, c.in_ns, float(c.idle * x[c.Z[j]]))


def fractional_profile(model: WindowModel, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What it takes to carry out the fractions of `x` [n] late: an estimate.

    Copies to the host begin as early as they can, those from it as late as they can, one after the other.

    Returns:
        [2, N] bytes held when each operation first ends and begins; [N] ns by which the copies from the host that it
        needs, or what runs again for it, come too late for it to begin in time. Negative: they have so much time left.
    """
    a, n = model.arrays, len(model.arrays.graph)
    held, late = _Spans(n), np.full(n, -np.inf)
    ends = (*(place_of(t)[1] for t in model.boundaries), n - 1)
    nothing = np.zeros(n), np.zeros(len(a.size))
    _interval(held, late, a, -1, ends[0], *nothing, _held_at(model, x, 0), _Copies.of(model, x, 0))
    for k, start in enumerate(ends[:-1]):
        runs = values_at(model.R[k, k], x)
        runs[runs < HELD] = 0
        before = _held_at(model, x, k)
        before[a.producer > start] = 0
        after, copies = _held_at(model, x, k + 1), _Copies.of(model, x, k + 1)
        _interval(held, late, a, start, ends[k + 1], runs, before, after, copies)
    workspace = np.array([op.workspace_bytes for op in a.graph.operations], dtype=np.float64)
    return held.total() + workspace, late


def _held_at(model: WindowModel, x: np.ndarray, k: int) -> np.ndarray:
    """[V] share of each value that is resident at boundary k; at the end, beyond the last one, the kept values."""
    if k == len(model.boundaries):
        return model.arrays.keep.astype(np.float64)
    share = values_at(model.S[k], x)
    share[model.arrays.at[abs(model.boundaries[k])]] = 1.0
    return share


def _interval(
    held: _Spans, late: np.ndarray, a: Arrays, start: int, end: int, runs: np.ndarray, before: np.ndarray,
    after: np.ndarray, copies: _Copies | None,
) -> None:  # fmt: skip
    """Add the values of one interval (start, end]: `before` resident at its start, `after` at its end, [N] `runs`.

    Sets `late` [N] of its operations, if there are copies.
    """
    n = len(a.cost)
    inside = (a.reader > start) & (a.reader <= end)
    first, last = np.full(len(a.size), n), np.full(len(a.size), -1)
    np.minimum.at(first, a.read[inside], a.reader[inside])
    np.maximum.at(last, a.read[inside], a.reader[inside])
    first[(first == n) & (after > HELD)] = end
    lasts = a.cost.astype(np.float64)
    for i in np.nonzero(runs)[0][::-1].tolist():  # a repeated run comes right before its first use
        operation = a.graph.operations[i]
        stage = min((int(first[v]) for v in operation.outputs), default=n)
        stage = min(stage, end)
        lasts[stage] += runs[i] * a.cost[i]
        for v in operation.inputs:
            first[v], last[v] = min(first[v], stage), max(last[v], stage)
    old = a.producer <= start
    share = np.minimum(1.0, before + runs[a.producer])
    last = np.maximum(last, start)
    size, later = a.size.astype(np.float64), np.maximum(first, start + 1)
    kept = np.minimum(before, share) * old
    again = (share - kept) * old
    held.add(start + 1, last, size * kept)
    held.add(later, last, size * again)
    carried = np.minimum(after, share) * old
    held.add(last + 1, end, size * np.minimum(carried, kept))
    held.add(np.maximum(last + 1, later), end, size * np.maximum(carried - kept, 0))
    new = (a.producer > start) & (a.producer <= end)
    last = np.maximum(last, a.producer)
    held.add(a.producer, last, size * new)
    held.add(last + 1, end, size * after * new)
    if copies is not None:
        begins = np.concatenate([[0.0], np.cumsum(lasts[start + 1 : end + 1])])
        begins *= 1 + copies.idle / max(1.0, begins[-1])
        comes = np.minimum(copies.fetched, 1 - share) * old
        first = np.clip(first, start + 1, end)
        due = first - start - 1
        due_ns = copies.in_ns * (copies.rest_before + comes - np.where(last < first, copies.rest_after, 0))
        if end > start:
            late[start + 1 : end + 1] = np.cumsum(np.bincount(due, due_ns, end - start)) - begins[:-1]
        begun = start + 1 + _fetches(begins, due, copies.in_ns * comes)
        held.add(begun + 0.5, np.maximum(last, first), size * comes)
        held.add(np.maximum(last, first) + 1, end, size * np.minimum(comes, np.maximum(after - carried, 0)))
        release = np.clip(a.producer - start, 0, end - start)
        done = start + 1 + _sends(begins, release, copies.out_ns * copies.sent)
        until = np.where(done > end, end, done - 0.5)  # at the end of that operation it has ended
        held.add(last + 1, until, size * np.minimum(copies.sent, 1 - after) * (old | new))


def _fetches(begins: np.ndarray, due: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """[V] the stage in which each copy begins that lasts so long and ends before its stage `due`, as late as it can.

    Stages count from 0; [stages + 1] `begins` says when each begins.
    """
    stage, free = due.copy(), np.inf
    some = np.nonzero(lasts > 0)[0]
    for v in some[np.argsort(-due[some], kind="stable")].tolist():
        free = min(free, begins[due[v]]) - lasts[v]
        stage[v] = max(0, int(np.searchsorted(begins, free, side="right")) - 1)
    return np.minimum(stage, due)


def _sends(begins: np.ndarray, release: np.ndarray, lasts: np.ndarray) -> np.ndarray:
    """[V] the stage in which each copy ends that lasts so long and begins after its stage `release`, or -1."""
    stage, free = np.full(len(lasts), -1), 0.0
    some = np.nonzero(lasts > 0)[0]
    for v in some[np.argsort(release[some], kind="stable")].tolist():
        free = max(free, begins[release[v]]) + lasts[v]
        stage[v] = int(np.searchsorted(begins, free, side="left")) - 1
    return stage


class _Spans:
    """Bytes at the beginning and the end of each stage: a sum of amounts, each from one stage to another."""

    def __init__(self, n: int) -> None:
        self.change = np.zeros(2 * n + 4)

    def add(self, first: np.ndarray | int, last: np.ndarray | int, amount: np.ndarray) -> None:
        """Amounts over the stages first..last; none where last < first.

        An amount from t + 0.5 on is not there when stage t begins, one up to t - 0.5 is not there when it ends.
        """
        first, last = np.broadcast_to(first, amount.shape), np.broadcast_to(last, amount.shape)
        there = (last + 0.5 >= first) & (amount > 0)
        np.add.at(self.change, (2 * first[there]).astype(np.int64), amount[there])
        np.subtract.at(self.change, (2 * last[there]).astype(np.int64) + 2, amount[there])

    def total(self) -> np.ndarray:
        """[2, N] bytes when each stage ends, and when it begins."""
        return np.cumsum(self.change)[:-4].reshape(-1, 2).T[::-1]
