"""The bound of the window relaxation: from one boundary on, each round tries a few stages and adds the best one.

HiGHS proposes multipliers; exact arithmetic turns them into a certificate. See `remat.programs.windows` for the
relaxation and why its bound holds.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from remat.bounds.certificate import denominator_for, proven_bound
from remat.bounds.cuts import cuts_of_rows
from remat.bounds.window_profile import fractional_profile
from remat.certificate import KINDS, LINK_FORMAT, WINDOW_FORMAT, BoundCertificate
from remat.plan import Scope
from remat.problem import Problem
from remat.programs.highs import Simplex
from remat.programs.link_windows import LinkModel, build_link_model
from remat.programs.windows import NAMES, Arrays, Cut, Kind, WindowModel, build_window_model, place_of

MOST_BOUNDARIES = 24
WORTH = 1e-5  # share of the cost that some of the last rounds must have gained for another
PATIENCE = 4  # rounds, or solves of one LP with more rows each time, that gain nothing
NEARLY = 2e-4  # share of a bound
MOST_FIRST = 32  # stages compared for the first boundary, in scope free
TRIES, TRY_SHARE = 4, 0.1  # most boundaries to try in a round, and share of the time left after which no other is tried
NARROW = 0.05  # share of the memory that counts as room beside an operation at least
NEAR = 1e-3  # share of the operations: boundaries are not nearer to each other, because blocks repeat in large graphs

Solved = tuple[WindowModel, np.ndarray, np.ndarray]  # of `solve_windows`


class WindowBound:
    """The adaptive loop on one problem; `run` may be called again and goes on where it stopped.

    Attributes:
        columns: of the last LP.
        ended: another boundary is not expected to help.
    """

    def __init__(self, problem: Problem, *, with_cuts: bool = True, tries: int = TRIES) -> None:
        """Without cuts (rows KNAPSACK) the multipliers have a price (`remat.bounds.price`).

        Each round tries `tries` boundaries, or fewer as time goes by; with 1 no clock decides.
        """
        self.problem, self.with_cuts, self.tries = problem, with_cuts, tries
        self.columns = 0
        self.ended = len(problem.graph) < 2
        self._boundaries: tuple[int, ...] = ()
        self._last: Solved | None = None
        self._gained: list[int] = []
        self._proofs: list[BoundCertificate] = []
        self._cuts: dict[int, dict[Cut, None]] = {}
        self._active: tuple[WindowModel, np.ndarray] | None = None  # the last model, [rows] whether a row counted

    @property
    def best(self) -> BoundCertificate | None:
        """The certificate of the best bound so far, if it is above the cost of running everything once."""
        return self._proofs[-1] if self._proofs else None

    @property
    def rounds(self) -> int:
        """LPs solved."""
        return len(self._gained)

    @property
    def solved(self) -> Solved | None:
        """The last LP, its point and its multipliers."""
        return self._last

    @cached_property
    def _arrays(self) -> Arrays:
        return Arrays.of(self.problem.graph, self.problem.scope)

    def run(
        self, deadline: float, *, on_bound: Callable[[BoundCertificate], object] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False, rounds: int | None = None,
    ) -> None:  # fmt: skip
        """Rounds until the deadline (monotonic), so many at most; `should_stop` is asked before each LP and in it.

        `on_bound` gets each better bound with its proof. A round that the deadline ends is begun anew in the next run.
        """
        most = math.inf if rounds is None else self.rounds + rounds
        while not self.ended and self.rounds < most and not should_stop() and time.monotonic() < deadline:
            if not self._round(deadline, on_bound, should_stop):
                break

    def _first_boundaries(self) -> tuple[int, ...]:
        """Where the plan that repeats nothing has its peak; in scope free, where most bytes are certain near it.

        With a link, the start of that operation. An LP that begins with its start and its end takes ten times as long
        on a large graph, and later rounds find the end.
        """
        profile = self._arrays.profile()[:-1]
        if self.problem.scope is not Scope.FREE:
            t = int(np.argmax(profile))
            return (t,) if self.problem.link is None else (-t,)
        highest = np.argsort(-profile, kind="stable")[:MOST_FIRST].tolist()
        return (max(highest, key=self._arrays.certain_bytes),)

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The fewest whose bound is nearly the best one: with them a program in integers is much smaller."""
        return self.fewest_boundaries(0 if self.best is None else self.best.bound * (1 - NEARLY))

    def fewest_boundaries(self, bound: float) -> tuple[int, ...]:
        """The fewest boundaries whose LP proves `bound`, at most the best bound; without any bound the present ones."""
        return tuple(next((proof.boundaries for proof in self._proofs if proof.bound >= bound), self._boundaries))

    def model(self, boundaries: Sequence[int]) -> WindowModel:
        """The relaxation with these boundaries and every window between them."""
        windows = list(itertools.combinations(range(len(boundaries)), 2))
        arrays, budget, link = self._arrays, self.problem.budget_bytes, self.problem.link
        if link is not None:
            model = build_link_model(arrays, budget, boundaries, windows, link)
        else:
            is_staged = self.problem.scope is Scope.STAGED
            model = build_window_model(arrays, budget, boundaries, windows, slots=is_staged)
        return model.with_cuts([cut for t in boundaries for cut in self._cuts.get(t, ())])

    def solve(self, model: WindowModel, deadline: float, should_stop: Callable[[], bool]) -> Solved | None:
        """`solve_windows`, begun with the rows that counted in the last solve."""
        first = None if self._active is None else alike(model, *self._active)
        solved = solve_windows(
            model, deadline, None if self.tries == 1 else should_stop, first, with_cuts=self.with_cuts
        )  # fmt: skip
        if solved is not None:
            self._active = solved[0], solved[2] > 0
        return solved

    def _round(self, deadline: float, on_bound: Callable[[BoundCertificate], object], stop: Callable[[], bool]) -> bool:
        """The LP with one more boundary; whether it came to its end, or no boundary is left."""
        if not self._boundaries:
            self._boundaries = self._first_boundaries()
        if self._last is None:
            solved = self.solve(self.model(self._boundaries), deadline, stop)
        else:
            solved = self.with_another(*self._last[:2], deadline, stop)
            self.ended = solved is None and not self.candidates(*self._last[:2])
        if solved is None:
            return self.ended
        self._last = model, x, y = solved
        self._boundaries = model.boundaries
        self.columns = len(x)
        for cut in model.cuts:
            self._cuts.setdefault(cut.boundary, {})[cut] = None
        certificate = certify(self.problem, model, y)
        once = self.problem.graph.least_cost
        before = once if self.best is None else self.best.bound
        self._gained.append(certificate.bound - before)
        if certificate.bound > before:
            self._proofs.append(certificate)
            on_bound(certificate)
        settled = len(self._gained) > PATIENCE and max(self._gained[-PATIENCE:]) < WORTH * once
        self.ended = settled or len(self._boundaries) == MOST_BOUNDARIES
        return True

    def with_another(
        self, model: WindowModel, x: np.ndarray, deadline: float, should_stop: Callable[[], bool]
    ) -> Solved | None:  # fmt: skip
        """The solved LP with the best boundary of those tried; None without a candidate, or if no LP ended in time."""
        enough_tried = time.monotonic() + TRY_SHARE * (deadline - time.monotonic())
        best, active, begin = None, None, self._active
        for stage in self.candidates(model, x)[: self.tries]:
            self._active = begin
            boundaries = sorted([*model.boundaries, stage], key=place_of)
            solved = self.solve(self.model(boundaries), deadline, should_stop)
            if solved is not None and (best is None or _value(solved) > _value(best)):
                best, active = solved, self._active
            if solved is None or time.monotonic() > enough_tried:
                break
        self._active = active or begin
        return best

    def candidates(self, model: WindowModel, x: np.ndarray) -> list[int]:
        """Boundaries, not too near to others, where a lazy plan of the point x [n] exceeds memory, the best ones first.

        They are ordered by the excess for each byte of room that the operation leaves. Without a link memory is the
        same when an operation begins and ends, and boundaries are ends. If copies come too late for operations, the
        second boundary is the start of the one for which they come latest.
        """
        a, n = model.arrays, len(model.arrays.graph)
        memory, near = model.budget_bytes - a.graph.fixed_bytes, int(NEAR * n)
        held, late = fractional_profile(model, x)
        score = np.maximum(0.0, held - memory)
        score /= np.maximum(memory - a.working, max(1.0, NARROW * memory))
        score[0, ~model.can_be_boundary] = score[1, 0] = 0.0
        if self.problem.link is None:
            score[1] = 0.0
        for t, done in map(place_of, model.boundaries):
            score[:, max(0, t - near) : t] = score[:, t + 1 : t + near + 1] = 0.0
            score[int(done < t), t] = 0.0
        found: list[int] = []
        while len(found) < TRIES and np.any(score > 0):
            side, stage = divmod(int(np.argmax(score)), n)
            found.append(-stage if side else stage)
            score[:, max(0, stage - 1 - near) : stage + near + 2] = 0.0
        late[[0, *(-t for t in (*model.boundaries, *found) if t <= 0)]] = 0.0
        if np.max(late) > WORTH * a.cost.sum():
            found.insert(1, -int(np.argmax(late)))
        return found[:TRIES]


def solve_windows(
    model: WindowModel, deadline: float, should_stop: Callable[[], bool] | None, first: np.ndarray | None = None, *,
    with_cuts: bool = True,
) -> Solved | None:  # fmt: skip
    """(the model with more rows KNAPSACK, [n] values of the columns, [rows] multipliers) of the LP.

    None if it has no solution or did not end in time. `first` [rows] says which rows are likely to count.
    """
    program, row_scale, cost_scale = model.scaled()
    n = len(program.cost)
    if not n:
        return model, np.zeros(0), np.zeros(len(row_scale))
    always = model.is_bytes | model.is_time
    simplex, value, still = Simplex(program, always if first is None else always | first), -math.inf, 0
    while True:
        solved = simplex.solve(
            np.zeros(n), np.ones(n), time_limit_s=deadline - time.monotonic(), should_stop=should_stop
        )
        if solved is None or solved.x is None:
            return None
        before, value = value, float(program.cost @ solved.x)
        is_rising = value - before > WORTH * model.arrays.graph.total_cost * cost_scale
        still = 0 if is_rising else still + 1
        cuts = missed_cuts(model, solved.x) if with_cuts and is_rising else []
        more = (model.with_missed(solved.x) if still < PATIENCE else model).with_cuts(cuts)
        if more is model:
            return model, solved.x, solved.row_dual * row_scale / cost_scale
        model = more
        program, row_scale, cost_scale = model.scaled()
        simplex.extend(program)


def alike(model: WindowModel, other: WindowModel, chosen: np.ndarray) -> np.ndarray:
    """[rows] the rows of `model` whose narrowest wider window in `other` has the same row among the chosen [rows]."""
    t, old = (np.array([2 * t + done for t, done in map(place_of, each.boundaries)]) for each in (model, other))
    begin = np.searchsorted(old, t, side="right") - 1
    end = np.append(np.searchsorted(old, t[1:], side="left") - 1, len(old) - 1)
    key = model.row_key.copy()
    in_interval = (model.row_kind != Kind.CHOICE) & (model.row_kind <= Kind.KNAPSACK)
    key[in_interval, 0] = begin[key[in_interval, 0]]
    in_window = np.isin(model.row_kind, (Kind.NEED, Kind.EDGE, Kind.CONTINUITY, Kind.JOIN, Kind.EACH, Kind.CHOSEN))
    key[in_window, 1] = end[key[in_window, 1]]
    is_each = model.row_kind == Kind.EACH
    key[is_each, 3] = begin[key[is_each, 3]]
    here, there = _codes(model.row_kind, key), _codes(other.row_kind[chosen], other.row_key[chosen])
    return np.isin(here, there) | (model.row_kind == Kind.KNAPSACK)


def _codes(kind: np.ndarray, key: np.ndarray) -> np.ndarray:
    """[rows] a number for each kind and key; different ones may share a number by chance."""
    code = kind.astype(np.uint64)
    for column in key.T:
        code = code * np.uint64(0x9E3779B97F4A7C15) + column.astype(np.uint64) + np.uint64(1)
    return code


def missed_cuts(model: WindowModel, x: np.ndarray) -> list[Cut]:
    """New rows KNAPSACK that the point x [n] misses."""
    known, found = set(model.cuts), list[Cut]()
    rows = np.nonzero(model.row_kind == Kind.MEMORY)[0]
    for row, terms, most in cuts_of_rows(model.matrix, model.row_lower, rows, x):
        k = int(model.row_key[row, 0])
        value_of = {column: v for v, column in enumerate(model.S[k].tolist()) if column >= 0}
        weights = tuple((value_of[column], a) for column, a in terms if column in value_of)
        cut = Cut(model.boundaries[k], most, weights)
        if weights and cut not in known:
            found.append(cut)
    return found


def certify(problem: Problem, model: WindowModel, y: np.ndarray) -> BoundCertificate:
    """Round the multipliers to integers over a common denominator and count exactly what they prove."""
    graph = problem.graph
    denominator = denominator_for(float(np.min(y[y > 0], initial=1.0)))
    multipliers = multipliers_of(model, y, denominator)
    bound = proven_bound(
        graph, problem.budget_bytes, problem.scope, multipliers, denominator, model.boundaries, problem.link
    )
    return BoundCertificate(
        graph.name, graph.sha256(), problem.budget_bytes, problem.scope, bound, denominator, multipliers,
        model.boundaries, link=problem.link,
    )  # fmt: skip


def multipliers_of(model: WindowModel, y: np.ndarray, denominator: int) -> dict[str, list[list[int]]]:
    """[kind of rows] the multipliers `y` [rows] as a certificate holds them, rounded down."""
    kinds = KINDS[LINK_FORMAT if isinstance(model, LinkModel) else WINDOW_FORMAT]
    multipliers: dict[str, list[list[int]]] = {name: [] for name in kinds}
    for row in np.nonzero(y > 0)[0].tolist():
        name, amount = NAMES[model.row_kind[row]], int(y[row] * denominator)
        key = model.row_key[row].tolist()
        if model.row_kind[row] == Kind.KNAPSACK:
            cut = model.cuts[key[1]]
            key = [key[0], cut.most, *(number for weight in cut.weights for number in weight)]
        else:
            key = key[: kinds[name]]
        if amount:
            multipliers[name].append([*key, amount])
    return multipliers


def _value(solved: Solved) -> float:
    """What the LP's point costs beyond running everything once."""
    return float(solved[0].cost @ solved[1])
