"""The window relaxation in integers: trees and HiGHS raise the bound that its LP leaves, and point at a plan.

Each solution is carried out as late as possible: where it fits the budget it is a plan, otherwise the stage that it
exceeds most is the next boundary. A tree (`remat.bounds.window_tree`) has a certificate. HiGHS often proves more, but
within its tolerances only. It gets the columns that a plan better than the best one known can use. Its memory rows
have more room, because it may take a row that is met exactly for one that is missed: half a unit, which no
integer point can use, or a ten-millionth of the budget where that is more. A bound for a larger budget holds for the
smaller one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from remat.bounds.window_tree import Gains, Tree, enough_for
from remat.bounds.windows import WindowBound
from remat.certificate import BoundCertificate
from remat.incumbent import GAP_TOLERANCE, Incumbent
from remat.plan import COMPUTE, Plan
from remat.problem import Problem
from remat.programs.highs import solve_program
from remat.programs.program import TOLERANCE, least_whole
from remat.programs.windows import WindowModel
from remat.simulator import simulate

MOST_COLUMNS = 60_000  # a larger program does not end in minutes
GAP = 2e-5  # of a program, below the gap that counts as optimal
ENOUGH = 0.9 * GAP_TOLERANCE  # gap to the best plan that a tree is to prove
ROOM = 100 * TOLERANCE  # beside a scaled budget of 1000: a solver can tell it from its tolerance
SMALL = 1e-5  # scaled bytes, a hundred-millionth of the budget: a value below it may always be held
CERTAIN = 0.5  # a column of an integer solution is 1 above it
BEGIN = 0.05  # the first round has the fewest boundaries whose gap is so much above the least
SHARE = 0.4  # of the time that is left, for each tree and for each program of HiGHS
SHARE_AGAIN = 0.8  # of the time that is left, for an earlier tree that goes on
NODES_PER_S, COLUMNS_PER_S = 6, 30  # most nodes of a tree and most columns for HiGHS, for each second that is left
COUNTED_NODES_PER_S = 10_000  # of trees with one column, in a run that repeats exactly
SHARE_OF_ANY = 0.03  # of the time that is left, in which a tree may have any number of nodes


@dataclass(frozen=True, slots=True)
class Listener:
    """What becomes of the findings of `raise_bound`.

    Attributes:
        on_proof: gets each tree's certificate.
        on_bound: gets each bound of HiGHS.
        on_plan: gets the plan of each optimum in integers, of graphs without implementations.
        should_stop: is asked between the steps and in them.
    """

    on_proof: Callable[[BoundCertificate], object]
    on_bound: Callable[[int], object]
    on_plan: Callable[[Plan], object]
    should_stop: Callable[[], bool]


class WindowIntegers:
    """Rounds with one more boundary each; `run` may be called again and goes on where it stopped.

    A round is a tree, and a small program for HiGHS if the tree is left open. A tree that proves less in its time than
    an earlier one did gives way to that one, unless the earlier one is full. The trees are to prove that no plan is
    cheaper than the best one known, or, if the problem has a cost cap, that none is within the cap.

    Attributes:
        rounds: begun so far.
        ended: a certificate proves enough, or no other boundary is expected to help.
        is_cut: the clock ended a step.
    """

    def __init__(self, windows: WindowBound, known: Incumbent) -> None:
        self.windows, self.known = windows, known
        self.rounds, self.ended, self.is_cut = 0, False, False
        self._boundaries: list[int] = []
        self._best: Tree | None = None  # the open tree of the highest bound, or the one that follows a full tree
        self._learned: Gains = {}  # by branching in earlier trees
        self._proven = 0.0  # the highest bound of a tree
        self._nodes: int | None = None  # left in a run that counts them

    def run(self, deadline: float, listener: Listener, nodes: int | None = None) -> None:
        """Rounds until one ends with a plan, or the deadline (monotonic).

        With `nodes`, trees with so many nodes in all, and nothing else: two runs are then the same unless `is_cut`.
        """
        self.deadline, self.listener, self._nodes = deadline, listener, nodes
        if not self._boundaries:
            goal, best, first = self.goal, self.windows.best, self.windows.boundaries
            if goal is not None and best is not None:
                first = self.windows.fewest_boundaries(goal - (1 + BEGIN) * (goal - best.bound))
            self._boundaries = list(first)
        if self._best is not None:
            tree = self._best
            whole = self._go_on(tree)
            boundaries = self._boundaries if whole is None else self._next(tree.model, whole, whole)
            if boundaries is not None:
                self._boundaries = boundaries
            self.ended = tree.is_closed or not self._boundaries
        while not self.ended and self._nodes != 0 and not listener.should_stop() and time.monotonic() < deadline:
            model = self.windows.model(self._boundaries) if self._boundaries else None
            if model is None or len(model.cost) > MOST_COLUMNS:
                self.ended = True
                break
            self.rounds += 1
            boundaries = self._round(model)
            if boundaries is None:
                break
            self._boundaries = boundaries
            self.ended = not boundaries
        self.is_cut = self.is_cut or (not self.ended and time.monotonic() >= deadline)

    @property
    def goal(self) -> int | None:
        """The bound that is to be proven; None without a plan and a cost cap."""
        cap, cost = self.windows.problem.cost_cap, self.known.cost
        if cap is not None:
            return cap + 1
        return None if cost is None else math.ceil((1 - ENOUGH) * cost)

    def _round(self, model: WindowModel) -> list[int] | None:
        """The boundaries of the next round, empty if there is no next one; None if an LP did not end in time."""
        solved = self.windows.solve(model, self.deadline, self.listener.should_stop)
        if solved is None:
            return None
        model, point, y = solved
        whole: np.ndarray | None = None
        tree, goal = None, self.goal
        if goal is not None:
            tree, whole = self._branch(Tree(model, y, enough_for(goal), self._learned))
            if tree.is_closed:
                return []
            if not tree.is_begun:
                return None
            if tree.weakest is not None:
                model, point, y = tree.model, tree.weakest, tree.y
        is_small = len(model.cost) <= COLUMNS_PER_S * (self.deadline - time.monotonic())
        if whole is None and is_small and self._nodes is None and not self.listener.should_stop():
            found, bound, ended = _solve(model, y, self._worthless_from, self._share_ends(), self.listener.should_stop)
            whole = found if ended else None
            if bound is not None:
                self.listener.on_bound(bound)
            if tree is not None and goal is not None and (bound or 0) >= goal:  # the tree is to certify it
                whole = self._go_on(tree, 1.0)
                if tree.is_closed:
                    return []
                point = point if tree.weakest is None else tree.weakest
        return self._next(model, point, whole)

    @property
    def _worthless_from(self) -> int | None:
        """The cost from which on plans do not matter; None without a plan and a cost cap."""
        return self.known.cost if self.windows.problem.cost_cap is None else self.goal

    def _branch(self, tree: Tree) -> tuple[Tree, np.ndarray | None]:
        """(the tree after its time, or a better earlier one that went on; a point in integers that is cheaper)."""
        whole = None
        if self._nodes is None:
            whole = self._grow(tree, SHARE_OF_ANY)
        if whole is None:
            whole = self._grow(tree, SHARE, NODES_PER_S * max(0.0, self.deadline - time.monotonic()))
        if _is_open(tree, whole) and self._best is not None and self._best.bound >= tree.bound:
            if not self._best.is_full:
                return self._best, self._go_on(self._best)
            whole = self._grow(tree, SHARE_AGAIN)
        self._prove(tree)
        if _is_open(tree, whole):
            self._best = tree
        return tree, whole

    def _go_on(self, tree: Tree, share: float = SHARE_AGAIN) -> np.ndarray | None:
        """Continue the best tree; a point in integers that is cheaper, if found."""
        assert self.goal is not None
        tree.enough = min(tree.enough, enough_for(self.goal))
        whole = self._grow(tree, share)
        self._prove(tree)
        if not _is_open(tree, whole):
            self._best = None
        return whole

    def _grow(self, tree: Tree, share: float, most_nodes: float = math.inf) -> np.ndarray | None:
        """`Tree.run` for a share of the time that is left, or of the nodes if they are counted."""
        if self._nodes is None:
            whole = tree.run(self._share_ends(share), self.listener.should_stop, most_nodes)
        else:
            before = len(tree.nodes)
            most = before + max(1, int(share * self._nodes))
            whole = tree.run(self.deadline, self.listener.should_stop, most)
            self._nodes = max(0, self._nodes - max(1, len(tree.nodes) - before))
            self.is_cut = self.is_cut or tree.is_cut
        self._learned = {**self._learned, **tree.learned}
        return whole

    def _prove(self, tree: Tree) -> None:
        """Hand over the certificate if it proves more than those before."""
        if tree.bound > self._proven:
            self._proven = tree.bound
            self.listener.on_proof(tree.certificate(self.windows.problem))

    def _next(self, model: WindowModel, point: np.ndarray, whole: np.ndarray | None) -> list[int] | None:
        """The next boundaries, by the optimum in integers or by the LP's point where the bound is least.

        They are empty if no boundary is left to try, and None if no LP ended in time.
        They stay the same after a better plan, because a tree is to prove that no other is cheaper.
        """
        if whole is not None and model.is_a_plan:
            plan, goal = plan_of(model, whole), self.goal
            self.listener.on_plan(plan)
            stage = _boundary_for(self.windows.problem, model, plan)
            if stage is not None:
                return sorted([*model.boundaries, stage])
            if self.goal != goal:
                return list(model.boundaries)
        solved = self.windows.with_another(model, point, self.deadline, self.listener.should_stop)
        if solved is None:
            return None if self.windows.candidates(model, point) else []
        return list(solved[0].boundaries)

    def _share_ends(self, share: float = SHARE) -> float:
        """The monotonic time at which a share of the time that is left is over."""
        return time.monotonic() + share * (self.deadline - time.monotonic())


def _is_open(tree: Tree, whole: np.ndarray | None) -> bool:
    """Whether a tree can go on: it found no point in integers that is cheaper, and a leaf is open."""
    return whole is None and tree.weakest is not None


def _boundary_for(problem: Problem, model: WindowModel, plan: Plan) -> int | None:
    """The stage in which the plan exceeds the budget most, or else the one before it, and so on; None if there is none.

    In scope staged, the stage before a boundary brings rows of slots.
    """
    graph, n = model.arrays.graph, len(model.arrays.graph)
    runs, begun = plan.ids[plan.kinds == COMPUTE], 0
    stage, excess = np.empty(len(runs), dtype=np.int64), np.zeros(n, dtype=np.int64)
    for at, k in enumerate(runs.tolist()):
        stage[at] = min(begun, n - 1)
        begun += k == begun
    np.maximum.at(excess, stage, simulate(graph, plan).running_bytes - problem.budget_bytes)
    for worst in np.argsort(-excess, kind="stable").tolist():
        if excess[worst] <= 0:
            break
        for boundary in (worst, worst - 1):
            if boundary >= 0 and model.can_be_boundary[boundary]:
                return boundary
    return None


def _solve(
    model: WindowModel, y: np.ndarray, best: int | None, deadline: float, should_stop: Callable[[], bool]
) -> tuple[np.ndarray | None, int | None, bool]:
    """([n] the best point or None, the bound or None, whether it was solved to the end)."""
    total = model.arrays.graph.total_cost
    program, row_scale, cost_scale = model.scaled()
    reduced = model.cost - model.matrix.T @ y
    least = total + float(y @ model.row_lower + np.minimum(0.0, reduced).sum())
    too_much = np.full(len(reduced), False)
    if best is not None:
        too_much = least + np.abs(reduced) > best * (1 + TOLERANCE)
    room = np.where(model.is_bytes, np.maximum(0.5 * model.units * row_scale, ROOM), 0.0)
    matrix = program.matrix.copy()
    matrix.data[(matrix.data < 0) & (matrix.data > -SMALL)] = 0.0
    matrix.eliminate_zeros()
    program = replace(
        program, matrix=matrix, row_lower=program.row_lower - room, is_integer=model.is_whole,
        upper=np.where(too_much & (reduced > 0), 0.0, 1.0), lower=np.where(too_much & (reduced < 0), 1.0, 0.0),
    )  # fmt: skip
    options = {"threads": 1, "mip_rel_gap": GAP, "time_limit": max(0.1, deadline - time.monotonic())}
    answer = solve_program(program, options, should_stop=should_stop)
    if answer.infeasible:
        return None, best, True  # no plan is cheaper than the best one
    bound = None
    if np.isfinite(answer.bound):
        bound = total + least_whole(answer.bound / cost_scale, cost_scale)
        bound = bound if best is None else min(bound, best)
    return answer.x, bound, answer.optimal


def plan_of(model: WindowModel, x: np.ndarray) -> Plan:
    """The plan that holds at each boundary what an integer point `x` [n] says, and repeats as late as possible."""
    graph = model.arrays.graph
    order: list[int] = []
    resident: set[int] = set()

    def run(k: int) -> None:
        """Run operation k, after the runs that make what it lacks."""
        todo = [k]
        while todo:
            lacks = [v for v in graph.operations[todo[-1]].inputs if v not in resident]
            if lacks:
                todo += [graph.producer[v] for v in lacks]
                continue
            k = todo.pop()
            if todo and resident.issuperset(graph.operations[k].outputs):  # another operation asked for it too
                continue
            order.append(k)
            resident.update(graph.operations[k].outputs)

    start = 0
    for k, end in enumerate(model.boundaries):
        for operation in range(start, end):
            run(operation)
        start = end + 1
        held = _held(model, x, k)
        for v in sorted(held - resident):
            if graph.producer[v] < end:
                run(graph.producer[v])
        run(end)
        resident &= held | set(model.arrays.at[end].tolist())
    for operation in range(start, len(graph)):
        run(operation)
    for v, value in enumerate(graph.values):
        if value.keep and v not in resident:
            run(graph.producer[v])
    return Plan.from_order(graph, order)


def _held(model: WindowModel, x: np.ndarray, k: int) -> set[int]:
    """Values that the point holds at boundary k, those of which it says nothing (in scope free), and run-once ones."""
    columns, a = model.S[k], model.arrays
    is_held = ~(a.sides(model.boundaries[k]).before & a.repeatable)[a.producer]
    is_held[columns >= 0] |= x[columns[columns >= 0]] > CERTAIN
    return set(np.nonzero(is_held)[0].tolist())
