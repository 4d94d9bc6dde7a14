"""Check lower bounds from their multipliers in exact integer arithmetic, without a solver.

A bound comes with a multiplier for some rows of the staged relaxation (`remat.programs.staged`). By weak
duality every choice of non-negative multipliers y proves a bound: the sum of y times the rows
``a x >= b``, corrected with the reduced costs d = c - y A over the boxes 0 <= x <= 1, gives

    cost >= (cost of running everything once) + y b + sum over columns of min(0, d).

So the solver that found y need not be trusted. This module states the rows a second time, directly from the
definitions and independently of the solved model:

- edge (t, k, v): S[t,v] + R[t,p] - R[t,k] >= 0, operation k reads v, made by p (for k = t: >= 1);
- continuity (t, v): S[t,v] + R[t,p] - S[t+1,v] >= 0 (a kept value, t the last stage: >= 1);
- memory (t): the inputs, outputs and workspace of t, and every S[t+1,v] made before t and not
  read by t, fit the budget (the room left is rounded down to a multiple of the values' greatest common divisor);
- knapsack (t, right, v, a, v, a, ...): Sum of a S[t+1,v] <= right, if no set of these values that fits the room
  left by the memory row of t weighs more (checked by a dynamic program);
- once (t, k): R[t,k] + S[t,v] <= 1, v the one output of k (staged scope only).

R[t,k] with t <= k, and R and S after the last stage in which they can be useful, are zero.

If operations have several implementations, these rows are those of the relaxed graph (`remat.bounds.relax` says why its
bounds hold). The certificate names the full graph, and the checker itself relaxes the graph that it gets. The rows of
the window relaxation have columns for the choice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from remat.bounds.relax import relaxed
from remat.bounds.window_rows import Column, LinkRows, Row, RowSums, Terms, WindowRows, within
from remat.certificate import BoundCertificate, TreeNode
from remat.errors import InvalidInput, shown
from remat.graph import Graph, check_graph
from remat.link import Link, parse_link
from remat.plan import Scope, parse_scope
from remat.units import format_size, parse_size


def verify_bound(
    graph: Graph,
    certificate: BoundCertificate | str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    scope: str | None = None,
    link: Link | str | None = None,
) -> int:
    """Check a certificate in exact integer arithmetic and return the bound that it proves.

    The time is linear in the certificate, times the number of values for each row of memory. Each node of a tree adds
    at most operations times boundaries. If operations have several implementations, the bound holds for every choice.

    Args:
        budget, scope, link: the problem that needs the bound, by default the certificate's own. A certificate for a
            smaller budget, a narrower scope, a slower link or no copies proves nothing for it and is refused.

    Returns:
        The certificate's bound: it holds for its `budget_bytes` (and every smaller one) and its `scope` (and every
        narrower one).

    Raises:
        InvalidInput: the certificate is about another graph, budget or scope, is malformed, or proves less than it
            claims.
    """
    check_graph(graph)
    if isinstance(certificate, BoundCertificate):  # check it as strictly as a file, because anyone may have made it
        try:
            certificate = BoundCertificate.from_dict(certificate.to_dict(), "the certificate")
        except InvalidInput:
            raise
        except (TypeError, AttributeError, ValueError):
            raise InvalidInput("the certificate is malformed; see remat.BoundCertificate") from None
    elif isinstance(certificate, (str, os.PathLike)):
        certificate = BoundCertificate.load(certificate)
    else:
        raise InvalidInput(f"the certificate must be a remat.BoundCertificate or a file, not {shown(certificate)}")
    if certificate.graph_sha256 != graph.sha256():
        raise InvalidInput(f"the bound is about another graph ({certificate.graph_name!r:.60}), not '{graph.name}'")
    if budget is not None and parse_size(budget) > certificate.budget_bytes:
        raise InvalidInput(f"the bound holds up to {format_size(certificate.budget_bytes)}, not for {budget}")
    if scope is not None and not certificate.scope.contains(parse_scope(scope)):
        raise InvalidInput(f"the bound holds for scope {certificate.scope}, not for {scope}")
    wanted, own = parse_link(link), certificate.link
    if wanted is not None and (own is None or not own.is_no_worse_than(wanted)):
        raise InvalidInput(f"the bound holds {'without copies' if own is None else f'over {own}'}, not over {wanted}")
    if certificate.tree:
        proven = proven_by_tree(
            graph, certificate.budget_bytes, certificate.scope, certificate.tree, certificate.boundaries,
            certificate.bound, certificate.link,
        )  # fmt: skip
    else:
        proven = proven_bound(
            graph, certificate.budget_bytes, certificate.scope, certificate.multipliers, certificate.denominator,
            certificate.boundaries, certificate.link,
        )  # fmt: skip
    if certificate.bound > proven:
        raise InvalidInput(f"the certificate claims a bound of {certificate.bound}, but proves only {proven}")
    return certificate.bound


def denominator_for(least: float) -> int:
    """A power of two over which multipliers from `least` up are integers of 24 bits or more, as far as 60 bits go."""
    return 1 << max(0, min(60, 24 - math.floor(math.log2(max(least, 1e-12)))))


def proven_bound(
    graph: Graph,
    budget_bytes: int,
    scope: Scope,
    multipliers: Mapping[str, Sequence[Sequence[int]]],
    denominator: int,
    boundaries: Sequence[int] = (),
    link: Link | None = None,
) -> int:
    """The bound that the multipliers prove, rounded up to an integer.

    Raises:
        InvalidInput: a row that does not exist or is not valid in this scope, or a negative multiplier.
    """
    if denominator < 1:
        raise InvalidInput(f"the denominator must be positive, not {denominator}")
    if scope is Scope.FREE and not boundaries and any(multipliers.values()):
        raise InvalidInput("rows without boundaries presume the order of first runs; they prove nothing for scope free")
    _refuse_staged_rows(multipliers, scope)
    rows: RowSums
    if link is not None or boundaries:
        rows = _window_rows(graph, budget_bytes, boundaries, scope, link)
    else:
        rows = _Rows(relaxed(graph), budget_bytes, scope)
    _add_rows(rows, multipliers)
    return rows.most(graph.least_cost + -(-rows.value(denominator) // denominator))


def proven_by_tree(
    graph: Graph, budget_bytes: int, scope: Scope, tree: Sequence[TreeNode], boundaries: Sequence[int], claim: int,
    link: Link | None = None,
) -> int:  # fmt: skip
    """The bound that a branch and bound over the window relaxation proves: the least of its leaves, at most `claim`.

    A node's multipliers may prove that a column's other value costs `claim` or more. Below the node it is fixed.

    Raises:
        InvalidInput: as for `proven_bound`, and for a tree that is none.
    """
    rows = _window_rows(graph, budget_bytes, boundaries, scope, link)
    _check_shape(tree, rows)
    total, leaves, fixed = graph.least_cost, list[int](), dict[Column, int]()
    # Depth first: (node, bound of its parent, what fixes columns in it), or the columns to be set free again.
    todo: list[tuple[int, int, dict[Column, int]] | dict[Column, int | None]] = [(0, total, {})]
    while todo:
        step = todo.pop()
        if isinstance(step, dict):
            _set_free(fixed, step)
            continue
        index, bound, branch = step
        before: dict[Column, int | None] = {column: fixed.get(column) for column in branch}
        fixed |= branch
        node = tree[index]
        _refuse_staged_rows(node.multipliers, scope)
        rows.clear()
        _add_rows(rows, node.multipliers)
        value = rows.value(node.denominator, fixed)
        bound = max(bound, total + -(-value // node.denominator))
        todo.append(before)
        if node.column is None:
            leaves.append(bound)
            continue
        if bound < claim:
            missing = (claim - total - 1) * node.denominator + 1 - value
            decided = {c: x for c, x in rows.decided(node.denominator, missing).items() if c not in fixed}
            before |= dict.fromkeys(decided)
            fixed |= decided
        todo += [(node.zero, bound, {node.column: 0}), (node.one, bound, {node.column: 1})]
    return rows.most(min(claim, *leaves))


def _window_rows(
    graph: Graph, budget_bytes: int, boundaries: Sequence[int], scope: Scope, link: Link | None
) -> WindowRows:  # fmt: skip
    """The rows of the window relaxation, with or without copies."""
    if link is not None:
        return LinkRows(graph, budget_bytes, boundaries, scope, link)
    if min(boundaries, default=0) < 0:
        raise InvalidInput("boundaries at the start of an operation need a link")
    return WindowRows(graph, budget_bytes, boundaries, scope)


def _check_shape(tree: Sequence[TreeNode], rows: WindowRows) -> None:
    """Refuse what is no tree: each node but the first has one parent before it, and branches are on columns."""
    children: list[int] = []
    for index, node in enumerate(tree):
        if node.denominator < 1:
            raise InvalidInput(f"the denominator must be positive, not {node.denominator!s:.40}")
        if node.column is None:
            continue
        if not index < min(node.zero, node.one) or max(node.zero, node.one) >= len(tree):
            raise InvalidInput(f"node {index} of the tree has no two children after it")
        if not rows.has_column(node.column):
            raise InvalidInput(f"node {index} of the tree branches on {node.column!s:.80}, which is not a column")
        children += [node.zero, node.one]
    if sorted(children) != list(range(1, len(tree))):
        raise InvalidInput("a node of the tree has more than one parent, or none")


def _set_free(fixed: dict[Column, int], before: dict[Column, int | None]) -> None:
    """Give columns back the values that they had before."""
    for column, x in before.items():
        if x is None:
            del fixed[column]
        else:
            fixed[column] = x


def _refuse_staged_rows(multipliers: Mapping[str, Sequence[Sequence[int]]], scope: Scope) -> None:
    for kind in () if scope is Scope.STAGED else ("once", "run", "later", "slot"):
        if multipliers.get(kind):
            raise InvalidInput(f"rows of kind '{kind}' hold for scope staged only")


def _add_rows(rows: RowSums, multipliers: Mapping[str, Sequence[Sequence[int]]]) -> None:
    for kind, entries in multipliers.items():
        for *row, y in entries:
            if y < 0:
                raise InvalidInput(f"the multiplier of the {kind} row {row!s:.80} is negative")
            if not 0 <= row[0] < rows.n_places or not rows.add(kind, row, y):
                raise InvalidInput(f"the certificate uses the {kind} row {row!s:.80}, which does not exist")


def _last_uses(graph: Graph) -> tuple[list[int], list[int]]:
    """([N], [V]) last stage in which each operation and each value can be useful; N for kept values."""
    n = len(graph)
    last_run, last_held = list(range(n)), list(graph.producer)
    for k in reversed(range(n)):
        for v in graph.operations[k].outputs:
            last_held[v] = n if graph.values[v].keep else max((last_run[user] for user in graph.users[v]), default=k)
            if not graph.operations[k].run_once:
                last_run[k] = max(last_run[k], min(last_held[v], n - 1))
    return last_run, last_held


class _Rows(RowSums):
    """The rows of the staged relaxation; R[t,k] is the column ("R", t, t, k), and S[t,v] is ("S", t, t, v)."""

    def __init__(self, graph: Graph, budget_bytes: int, scope: Scope) -> None:
        super().__init__(graph, budget_bytes)
        self.scope, self.n = scope, len(graph)
        self.last_run, self.last_held = _last_uses(graph)

    def _cost(self, column: Column) -> int:
        return self.graph.operations[column[3]].cost if column[0] == "R" else 0

    def edge(self, t: int, k: int, v: int) -> Row | None:
        """S[t,v] + R[t,p] - R[t,k] >= 0; for k = t: >= 1."""
        if not 0 <= k <= t or v not in self.graph.operations[k].inputs or (k < t and t > self.last_run[k]):
            return None
        return (self._provided(t, v), 1) if k == t else ([*self._provided(t, v), (-1, ("R", t, t, k))], 0)

    def continuity(self, t: int, v: int) -> Row | None:
        """S[t,v] + R[t,p] - S[t+1,v] >= 0; for a kept value in the last stage: >= 1."""
        if not self._can_be_held_beyond(t, v):
            return None
        if t + 1 == self.n:  # only kept values reach the end
            return self._provided(t, v), 1
        return [*self._provided(t, v), (-1, ("S", t + 1, t + 1, v))], 0

    def once(self, t: int, k: int) -> Row | None:
        """R[t,k] + S[t,v] <= 1, v the one output of k."""
        if not 0 <= k < t or len(self.graph.operations[k].outputs) != 1 or t > self.last_run[k]:
            return None
        return [(-1, ("R", t, t, k)), (-1, ("S", t, t, self.graph.operations[k].outputs[0]))], -1

    def knapsack(self, t: int, most: int, *terms: int) -> Row | None:
        """Sum of a S[t+1,v] <= most, if this follows from the memory row of t."""
        reads = self.graph.operations[t].inputs
        if t + 1 == self.n or not all(self._can_be_held_beyond(t, v) and v not in reads for v in terms[::2]):
            return None
        room = self.budget_bytes - self.graph.working_set_bytes(t)
        return self.knapsack_row(t + 1, room, most, terms, f"stage {t}")

    def memory(self, t: int) -> Row | None:
        """The working set of t, and every S[t+1,v] made before t and not read by t, fit the budget."""
        reads = set(self.graph.operations[t].inputs)
        room = self.budget_bytes - self.graph.working_set_bytes(t)
        held = [v for v, p in enumerate(self.producer) if p < t < self.last_held[v] and v not in reads]
        if t + 1 < self.n:
            return within(room, [(self.graph.values[v].bytes, ("S", t + 1, t + 1, v)) for v in held])
        if self.scope is Scope.STAGED:  # kept values; fixed_order may compute them again after the last operation
            room -= sum(self.graph.values[v].bytes for v in held)
        return within(room, [])

    def _can_be_held_beyond(self, t: int, v: int) -> bool:
        return 0 <= v < len(self.producer) and self.producer[v] < t < self.last_held[v]

    def _provided(self, t: int, v: int) -> Terms:
        """S[t,v] + R[t,p], p the producer of v."""
        p = self.producer[v]
        return [(1, ("S", t, t, v)), *([(1, ("R", t, t, p))] if t <= self.last_run[p] else [])]
