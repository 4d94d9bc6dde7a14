"""Branch and bound over the window relaxation: a bound in integers that comes with a certificate.

Each node fixes columns to 0 or 1 and solves the LP from its parent's basis. The multipliers of the LP prove the node's
bound, and fix every column whose other value would cost more than is wanted. The tree ends where each leaf proves
enough. Its certificate is the tree itself: `remat.bounds.certificate` counts it again in exact arithmetic.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from remat.bounds.certificate import denominator_for, proven_by_tree
from remat.bounds.windows import multipliers_of
from remat.certificate import BoundCertificate, TreeNode
from remat.problem import Problem
from remat.programs.highs import Basis, Simplex, Vertex
from remat.programs.program import ABSOLUTE_TOLERANCE, Program
from remat.programs.windows import WindowModel

ROUNDED, ROUNDED_SHARE = 0.01, 1e-6  # room for rounded multipliers, in costs and as a share of the bound
WHOLE = 1e-6  # a column is whole if it is as near to an integer
TRIED = 8  # columns at a node whose two children are solved, at most
TRIAL = 100  # iterations of a try
KNOWN = 2  # tries of a column, in earlier trees too, after which their results are trusted
MOST_ENTRIES = 800_000  # multipliers of a tree, so that its certificate stays within megabytes and seconds
COUNTED_S = 1e-5  # for each multiplier, to count the certificate
Place = tuple[str, int, int, int]  # of a column: its kind, its boundaries, its value or operation
Gains = Mapping[Place, tuple[np.ndarray, np.ndarray]]  # [0 and 1] the gains of a column in all tries, and their number
FREE = -1  # of a column: neither 0 nor 1 is fixed


@dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """A node; `fixed` [n] is 0, 1 or FREE; the multipliers are those above 0 and their rows.

    Attributes:
        x: the LP's point, None if the node is closed.
        branch: (column, node with 0, node with 1), None for a leaf.
        is_solved: whether the LP was solved to its end.
    """

    bound: float
    fixed: np.ndarray
    rows: np.ndarray
    multipliers: np.ndarray
    x: np.ndarray | None
    basis: Basis | None
    branch: tuple[int, int, int] | None = None
    is_solved: bool = True


def enough_for(goal: int) -> float:
    """The bound at which a node is closed so that the certificate claims `goal`: costs are whole numbers."""
    return goal - 1 + ROUNDED + ROUNDED_SHARE * goal


class Tree:
    """A branch and bound: `run`, which may be called again and goes on where it stopped; or `begin`, then `branch`.

    Attributes:
        y: [rows] the multipliers that it was given.
        nodes: the first one is the root, and children come after their parents.
        entries: multipliers of all nodes.
        is_begun: whether the LP at the root was solved.
        is_cut: the clock ended a run or an LP.
    """

    def __init__(self, model: WindowModel, y: np.ndarray, enough: float, learned: Gains = MappingProxyType({})) -> None:
        """`y` [rows] are multipliers of the LP, `enough` the bound at which a node is closed.

        `learned`: what branching on columns has gained in an earlier tree, whose boundaries may be others.
        """
        self.model, self.y, self.enough = model, y, enough
        self.is_cut = False
        program = self._take(model)
        self._simplex = Simplex(program, (y > 0) | model.is_bytes)
        self._total = model.arrays.graph.total_cost
        self._cost = model.cost.astype(np.float64)
        self._little = 1e-9 * enough
        self._gain, self._tries = np.zeros((2, len(self._cost))), np.zeros((2, len(self._cost)))
        for column, place in enumerate(self._places() if learned else ()):
            if place in learned:
                self._gain[:, column], self._tries[:, column] = learned[place]
        self.nodes: list[_Node] = []
        self.entries = 0
        self._open: list[tuple[float, int]] = []
        self.is_begun = False
        everything = np.full(len(self._cost), FREE, dtype=np.int8)
        bound, fixed = self._judge(y, everything)
        self._add(_Node(bound, fixed, *_sparse(y), None, None))

    def _places(self) -> list[Place]:
        """[n] the place of each column."""
        t = (*self.model.boundaries, len(self.model.arrays.graph))  # with a link, the end has columns too
        return [
            (kind, k if kind == "X" else t[k], t[m] if kind == "R" else m if kind == "U" else 0, i)
            for kind, k, m, i in self.model.columns
        ]

    @property
    def learned(self) -> Gains:
        """What branching on columns has gained here, for another tree."""
        places, tried = self._places(), np.flatnonzero(self._tries.any(axis=0)).tolist()
        return {places[j]: (self._gain[:, j].copy(), self._tries[:, j].copy()) for j in tried}

    @property
    def bound(self) -> float:
        """Least bound of a leaf."""
        return min((node.bound for node in self.nodes if node.branch is None), default=self.enough)

    @property
    def is_closed(self) -> bool:
        """Whether every leaf proves enough."""
        return self.bound >= self.enough

    @property
    def is_full(self) -> bool:
        """Whether the certificate would become too large if the tree went on."""
        return self.entries > MOST_ENTRIES

    def run(self, deadline: float, should_stop: Callable[[], bool], most_nodes: float = np.inf) -> np.ndarray | None:
        """Branch until every leaf is closed, or the limits. Returns an integer point [n] that is cheaper, if found.

        It ends early enough for the certificate to be counted before the deadline.
        """
        if not self.is_begun and not self.begin(deadline):
            return None
        while self._open and self._open[0][0] < self.enough and not should_stop():
            if self.is_full or len(self.nodes) > most_nodes:
                break
            if time.monotonic() + COUNTED_S * self.entries > deadline:
                self.is_cut = True
                break
            x, node = self.weakest, self.nodes[self._open[0][1]]
            assert x is not None
            is_open = (node.fixed == FREE) & self.model.is_whole
            fractional = np.nonzero((np.minimum(x, 1 - x) > WHOLE) & is_open)[0]
            if not len(fractional):
                return x
            if not self.branch(fractional, deadline):
                break
        return None

    @property
    def weakest(self) -> np.ndarray | None:
        """[n] the LP's point at the open leaf with the least bound; None if no leaf is open."""
        return self.nodes[self._open[0][1]].x if self._open else None

    def branch(self, columns: np.ndarray, deadline: float) -> bool:
        """Branch the open leaf with the least bound on the best of these columns; whether there was time for it."""
        place = self._open[0][1]
        found = self._best_branch(self.nodes[place], columns, deadline)
        if found is None:
            return False
        heapq.heappop(self._open)
        column, (zero, one) = found
        self.nodes[place] = replace(
            self.nodes[place], branch=(column, self._add(zero), self._add(one)), x=None, basis=None
        )
        return True

    def begin(self, deadline: float) -> bool:
        """Solve the LP with the columns that are left; whether there was time for it.

        The root's multipliers fix columns, and those of this LP presume that. One of the columns therefore becomes the
        root's branch: one child is closed, and the other one is the LP.
        """
        root = self.nodes[0]
        solved = self._solve(root.fixed, None, deadline)
        if solved is None:
            return False
        self.is_begun = True
        child = self._node(solved, root.fixed, root.bound)
        decided = np.nonzero(root.fixed != FREE)[0]
        if not len(decided):
            self.nodes.clear()
            self._add(child)
        elif root.bound < self.enough:
            column = int(decided[0])
            closed = replace(root, bound=self.enough)
            children = (closed, child) if root.fixed[column] else (child, closed)
            self.nodes[0] = replace(root, branch=(column, self._add(children[0]), self._add(children[1])))
        return True

    def _best_branch(self, node: _Node, columns: np.ndarray, deadline: float) -> tuple[int, tuple[_Node, _Node]] | None:
        """The column that raises both children's bounds most, of those tried, and the children; None if out of time."""
        assert node.x is not None
        tries = np.minimum(self._tries[0], self._tries[1])
        seen = np.maximum(self._tries, 1)
        mean = np.maximum(self._gain.sum(axis=1) / np.maximum(self._tries.sum(axis=1), 1), self._little)
        rate = np.where(self._tries > 0, self._gain / seen, mean[:, None])
        x = node.x[columns]
        expected = np.maximum(rate[:, columns] * np.stack([x, 1 - x]), self._little)
        score = expected[0] * expected[1]
        best: tuple[float, int, tuple[_Node, _Node] | None] | None = None
        for place in np.argsort(-score, kind="stable")[:TRIED].tolist():
            column = int(columns[place])
            if tries[column] >= KNOWN:
                if best is None or score[place] > best[0]:
                    best = (float(score[place]), column, None)
                continue
            children = self._children(node, column, deadline, iterations=TRIAL)
            if children is None:
                return None
            gains = [max(min(child.bound, self.enough) - node.bound, self._little) for child in children]
            if best is None or gains[0] * gains[1] > best[0]:
                best = (gains[0] * gains[1], column, children)
            if min(child.bound for child in children) >= self.enough:
                break
        assert best is not None
        children = self._children(node, best[1], deadline, best[2])
        return None if children is None else (best[1], children)

    def _children(
        self, node: _Node, column: int, deadline: float, tried: tuple[_Node, _Node] | None = None,
        iterations: int = 2**31 - 1,
    ) -> tuple[_Node, _Node] | None:  # fmt: skip
        """The nodes with 0 and with 1 for the column, begun from earlier ones, `tried`; None if out of time."""
        assert node.x is not None
        found = []
        for side in (0, 1):
            before = None if tried is None else tried[side]
            if before is not None and before.is_solved:
                found.append(before)
                continue
            fixed = node.fixed.copy()
            fixed[column] = side
            solved = self._solve(fixed, node.basis if before is None else before.basis, deadline, iterations)
            if solved is None:
                return None
            child = self._node(solved, fixed, node.bound)
            distance = 1 - node.x[column] if side else node.x[column]
            self._gain[side, column] += (min(child.bound, self.enough) - node.bound) / max(distance, WHOLE)
            self._tries[side, column] += 1
            found.append(child)
        return found[0], found[1]

    def _solve(
        self, fixed: np.ndarray, basis: Basis | None, deadline: float, iterations: int = 2**31 - 1
    ) -> Vertex | None:  # fmt: skip
        enough = (self.enough - self._total) * self._cost_scale + ABSOLUTE_TOLERANCE
        lower, upper = (fixed == 1).astype(np.float64), (fixed != 0).astype(np.float64)
        solved = self._simplex.solve(
            lower, upper, basis=basis, enough=enough, time_limit_s=deadline - time.monotonic(), iterations=iterations
        )
        self.is_cut = self.is_cut or solved is None
        if solved is None or solved.x is None or not solved.is_solved:
            return solved
        more = self.model.with_missed(solved.x)
        if more is self.model:
            return solved
        self._simplex.extend(self._take(more))
        return self._solve(fixed, None, deadline, iterations)

    def _take(self, model: WindowModel) -> Program:
        """Go on with this model, which has more rows; its program."""
        self.model = model
        program, self._row_scale, self._cost_scale = model.scaled()
        self._transposed = model.matrix.T.astype(np.float64).tocsr()
        self._lower = model.row_lower.astype(np.float64)
        self.y = np.append(self.y, np.zeros(len(self._lower) - len(self.y)))
        return program

    def _node(self, solved: Vertex, fixed: np.ndarray, least: float) -> _Node:
        """The node of a solved LP; its bound is at least its parent's, `least`."""
        y = solved.row_dual * self._row_scale / self._cost_scale
        if solved.x is None:
            y = self._multiple(solved.row_dual * self._row_scale, fixed)
        bound, more = self._judge(y, fixed)
        bound = max(bound, least)
        if bound >= self.enough:
            return _Node(bound, fixed, *_sparse(y), None, None)
        return _Node(bound, more, *_sparse(y), solved.x, solved.basis, is_solved=solved.is_solved)

    def _judge(self, y: np.ndarray, fixed: np.ndarray) -> tuple[float, np.ndarray]:
        """(the bound that multipliers prove, the columns fixed by them)."""
        reduced = self._cost - self._transposed @ y
        bound = self._total + _product(y, self._lower) + _least(reduced, fixed)
        decided = (fixed == FREE) & self.model.is_whole & (bound + np.abs(reduced) >= self.enough)
        return bound, np.where(decided, reduced < 0, fixed).astype(np.int8)

    def _multiple(self, ray: np.ndarray, fixed: np.ndarray) -> np.ndarray:
        """The multiple of a ray that proves enough; the ray itself if it proves nothing."""
        slope = _product(ray, self._lower) + _least(-(self._transposed @ ray), fixed)
        return ray * (2 * self.enough / slope) if slope > 0 else ray

    def _dense(self, node: _Node) -> np.ndarray:
        y = np.zeros(len(self._lower))
        y[node.rows] = node.multipliers
        return y

    def _add(self, node: _Node) -> int:
        """Append a node to the list, and to the open ones unless it is closed; its place."""
        self.nodes.append(node)
        self.entries += len(node.rows)
        if node.x is not None:
            heapq.heappush(self._open, (node.bound, len(self.nodes) - 1))
        return len(self.nodes) - 1

    def certificate(self, problem: Problem) -> BoundCertificate:
        """The tree with whole multipliers, and the bound that it proves in exact arithmetic."""
        names = self.model.columns
        tree = []
        for node in self.nodes:
            denominator = denominator_for(float(np.min(node.multipliers, initial=1.0)))
            multipliers = multipliers_of(self.model, self._dense(node), denominator)
            column, zero, one = (None, 0, 0) if node.branch is None else (names[node.branch[0]], *node.branch[1:])
            tree.append(TreeNode(denominator, multipliers, column, zero, one))
        graph, boundaries = problem.graph, self.model.boundaries
        claim = int(min(self.bound, self.enough)) + 1
        while True:  # a smaller claim fixes more columns, so that it ends after a few rounds
            proven = proven_by_tree(graph, problem.budget_bytes, problem.scope, tree, boundaries, claim, problem.link)
            if proven >= claim:
                break
            claim = proven
        return BoundCertificate(
            graph.name, graph.sha256(), problem.budget_bytes, problem.scope, claim, 1, {}, boundaries, tuple(tree),
            problem.link,
        )  # fmt: skip


def _least(weights: np.ndarray, fixed: np.ndarray) -> float:
    """Least sum of weights x over the columns 0 <= x <= 1 [n] that `fixed` leaves."""
    return float(np.where(fixed == FREE, np.minimum(0.0, weights), weights * (fixed == 1)).sum())


def _product(y: np.ndarray, lower: np.ndarray) -> float:
    """Of multipliers, nearly all 0, and the sides of their rows; threads of BLAS take the time of others for it."""
    rows = np.flatnonzero(y)
    return float(y[rows] @ lower[rows])


def _sparse(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(rows, multipliers) of those above 0."""
    rows = np.nonzero(y > 0)[0]
    return rows, y[rows]
