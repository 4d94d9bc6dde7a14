"""Forged certificates against brute force: what `make fuzz` runs as the campaign ``certificates``.

A case is a random small graph, with or without implementations, at a random budget and scope. The checker must accept
the certificate that the solver makes and must never accept a bound above the optimum, whatever is forged.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
from brute_force import optimum, random_problem
from brute_force_link import loose_optimum, tiny_graph, tiny_link
from helpers import context_of

from remat import BoundCertificate, Graph, InvalidInput, Link, Scope, verify_bound
from remat.bounds import certificate
from remat.bounds.lp import lower_bound
from remat.bounds.relax import relaxed
from remat.bounds.window_rows import LinkRows, RowSums, WindowRows
from remat.bounds.window_tree import Tree
from remat.bounds.windows import WindowBound, solve_windows
from remat.certificate import FORMAT, KINDS, LINK_FORMAT, WINDOW_FORMAT
from remat.problem import Problem
from remat.programs.windows import WindowModel, place_of
from remat.simulator import plain_peak

CLIMB = 300  # steps towards a bound that is too high
MOST_STATES = 40_000  # of the brute force with copies


def check(seed: int) -> str:
    """The outcome of one random case, see `fuzz`."""
    rng = np.random.default_rng(seed)
    graph, budget, name, _ = random_problem(rng, ["staged", "staged", "fixed_order", "fixed_order", "free"])
    best = cache(partial(optimum, graph))
    for make in (of_the_lp, of_windows, of_a_tree):
        wrong = wrong_with(graph, made_by(make, graph, budget, Scope(name)), rng, best)
        if wrong:
            return f"different: {make.__name__}: {wrong}"
    # The same with copies over a link, for a tiny graph.
    graph = tiny_graph(rng, 4)
    least, most = graph.largest_working_set()[0], plain_peak(graph)
    budget, link = int(rng.integers(least, max(least, most) + 1)), tiny_link(rng, host=rng.random() < 0.3)
    with_copies = cache(lambda budget: loose_optimum(graph, budget, link, MOST_STATES))
    for make in (of_windows, of_a_tree):
        genuine = made_by(make, graph, budget, Scope.STAGED, link)
        wrong = wrong_with(graph, genuine, rng, lambda budget, _: with_copies(budget))
        if wrong:
            return f"different: {make.__name__} with copies: {wrong}"
    return "ok"


def made_by(make: Any, graph: Graph, budget: int, scope: Scope, link: Link | None = None) -> BoundCertificate:
    """Its certificate, or where it proves nothing that of running everything once."""
    at = () if link is None else (0,)
    once = BoundCertificate(graph.name, graph.sha256(), budget, scope, graph.least_cost, 1, {}, at, link=link)
    return make(graph, budget, scope, *([] if link is None else [link])) or once


def of_the_lp(graph: Graph, budget: int, scope: Scope) -> BoundCertificate | None:
    """The certificate of the staged LP."""
    return lower_bound(context_of(graph, budget, scope=scope)).certificate


def of_windows(graph: Graph, budget: int, scope: Scope, link: Link | None = None) -> BoundCertificate | None:
    """The certificate of the window relaxation."""
    windows = WindowBound(replace(context_of(graph, budget, scope=scope).problem, link=link))
    windows.run(time.monotonic() + 60)
    return windows.best


def of_a_tree(graph: Graph, budget: int, scope: Scope, link: Link | None = None) -> BoundCertificate | None:
    """The certificate of a branch and bound of a few nodes, on columns that are drawn."""
    problem = replace(context_of(graph, budget, scope=scope).problem, link=link)
    rng, windows = np.random.default_rng(budget), WindowBound(problem)
    windows.run(time.monotonic() + 60, rounds=2)
    if not windows.boundaries:
        return None
    model = windows.model(windows.boundaries)
    solved = solve_windows(model, time.monotonic() + 60, lambda: False)
    if solved is None or not len(model.cost):
        return None
    enough = (windows.best.bound if windows.best else graph.least_cost) + float(rng.integers(0, 4))
    return branched(problem, *solved[::2], enough, rng)


def branched(
    problem: Problem, model: WindowModel, y: np.ndarray, enough: float, rng: np.random.Generator
) -> BoundCertificate:
    """The certificate of a few branches from the multipliers `y` of a solved model, on columns that are drawn."""
    tree = Tree(model, y * rng.choice([0.5, 1.0]), enough)
    tree.begin(time.monotonic() + 60)
    for _ in range(6):
        if tree.weakest is not None:
            tree.branch(rng.choice(np.nonzero(model.is_whole)[0], 1), time.monotonic() + 60)
    return tree.certificate(problem)


def wrong_with(
    graph: Graph, genuine: BoundCertificate, rng: np.random.Generator, best: Callable[[int, str], float | None]
) -> str:
    """What the checker does wrong with a genuine certificate and its forgeries; '' if nothing."""
    budget, scope = genuine.budget_bytes, genuine.scope
    least = best(budget, str(scope))
    if verify_bound(graph, genuine, budget=budget, scope=scope) != genuine.bound:
        return "the checker returns another bound than the certificate's"
    if least is not None and genuine.bound > least:
        return f"the genuine certificate proves {genuine.bound}, but a plan costs {least}"
    for what, forged in forgeries(graph, genuine, rng):
        try:
            proven = verify_bound(graph, forged)
        except InvalidInput as error:
            if "\n" in str(error) or len(str(error)) > 300:
                return f"the error is not one line: {error}"
            continue
        least = best(forged.budget_bytes, str(forged.scope))
        if least is not None and proven > least:
            return f"{what}: accepted {proven}, but a {forged.scope} plan costs {least}"
    uses: list[dict[str, Any]] = [{"budget": budget + 1}, *([] if scope is Scope.FREE else [{"scope": "free"}])]
    for use in uses:
        with suppress(InvalidInput):
            verify_bound(graph, genuine, **use)
            return f"a certificate is accepted for {use}"
    return ""


def forgeries(
    graph: Graph, genuine: BoundCertificate, rng: np.random.Generator
) -> Iterator[tuple[str, BoundCertificate]]:
    """(what was forged, the certificate); each claims more than it should, or as much as its multipliers prove."""
    for more in (1, 2, 1000):
        yield f"bound + {more}", replace(genuine, bound=genuine.bound + more)
    for scope in Scope:
        yield f"scope {scope}", replace(genuine, scope=scope)
    for budget in (genuine.budget_bytes + 1, genuine.budget_bytes + 5):
        yield f"budget {budget}", replace(genuine, budget_bytes=budget)
    make: Any = of_a_tree if genuine.tree else of_windows if genuine.boundaries or genuine.link else of_the_lp
    if genuine.link is not None:
        make = partial(make, link=genuine.link)
    tight = make(graph, max(0, genuine.budget_bytes - 2), genuine.scope)
    if tight is not None:
        yield "of a smaller budget", replace(tight, budget_bytes=genuine.budget_bytes)
    for other in others(graph, rng):
        foreign = make(other, genuine.budget_bytes, genuine.scope)
        if foreign is not None:
            yield "of another graph", foreign
            yield "of another graph, renamed", replace(foreign, graph_name=graph.name, graph_sha256=graph.sha256())
    if genuine.tree:
        for name, forged in felled(genuine, rng):
            proven = proven_by(graph, forged)
            if proven is not None:
                yield name, replace(forged, bound=proven)
                yield f"{name}, bound + 1", replace(forged, bound=proven + 1)
        return
    yield "invented", invented(graph, genuine, rng)
    if genuine.boundaries:
        moved = [t + int(rng.integers(-1, 2)) for t in genuine.boundaries]
        yield "boundaries moved", replace(genuine, boundaries=moved)
        turned = [-t if rng.random() < 0.5 else t for t in genuine.boundaries]
        yield "starts for ends, and ends for starts", replace(genuine, boundaries=turned)
    for name, forged in perturbed(genuine, rng):
        for denominator in (genuine.denominator, 1, 3):
            proven = proven_by(graph, replace(forged, denominator=denominator))
            if proven is not None:
                yield name, replace(forged, denominator=denominator, bound=proven)
                yield f"{name}, bound + 1", replace(forged, denominator=denominator, bound=proven + 1)


def proven_by(graph: Graph, forged: BoundCertificate) -> int | None:
    """The largest bound that the checker takes for these multipliers, as it says itself; None if it refuses them."""
    try:
        verify_bound(graph, replace(forged, bound=1 << 500))
    except InvalidInput as error:
        _, found, proven = str(error).partition("proves only ")
        return int(proven) if found else None
    raise AssertionError("a bound of 2**500 was accepted")


def others(graph: Graph, rng: np.random.Generator) -> Iterator[Graph]:
    """Graphs that are easily mistaken for this one."""
    yield graph.default()
    k, v = int(rng.integers(len(graph))), int(rng.integers(len(graph.values) - graph.n_extra))
    op, value = graph.operations[k], graph.values[v]
    base = graph.default()
    for changes in ({"cost": op.cost + 3}, {"run_once": not op.run_once}):
        changed = replace(op, implementations=(), **changes)
        yield replace(base, operations=(*base.operations[:k], changed, *base.operations[k + 1 :]))
    for one in (replace(value, bytes=value.bytes + 2), replace(value, keep=not value.keep)):
        yield replace(base, values=(*base.values[:v], one, *base.values[v + 1 :]))


def perturbed(genuine: BoundCertificate, rng: np.random.Generator) -> Iterator[tuple[str, BoundCertificate]]:
    """The genuine multipliers scaled, changed, and moved to other rows."""
    own = {kind: [list(row) for row in rows] for kind, rows in genuine.multipliers.items()}
    for factor in (2, 1000):
        scaled = {kind: [[*row[:-1], factor * row[-1]] for row in rows] for kind, rows in own.items()}
        yield f"multipliers times {factor}", replace(genuine, multipliers=scaled)
    for _ in range(3):
        changed = {
            kind: [[*row[:-1], int(row[-1] * rng.choice([0, 0.5, 1, 1, 1.01, 3]))] for row in rows]
            for kind, rows in own.items()
        }
        yield "multipliers changed", replace(genuine, multipliers=changed)
        kinds = [kind for kind in own if own[kind]]
        if kinds:
            moved = {kind: [list(row) for row in rows] for kind, rows in own.items()}
            rows = moved[str(rng.choice(kinds))]
            row = rows[int(rng.integers(len(rows)))]
            row[int(rng.integers(len(row)))] += int(rng.choice([-1, 1]))
            yield "a row moved", replace(genuine, multipliers=moved)


def felled(genuine: BoundCertificate, rng: np.random.Generator) -> Iterator[tuple[str, BoundCertificate]]:
    """The tree with one of its nodes changed."""
    own = list(genuine.tree)

    def with_node(at: int, **changes: Any) -> BoundCertificate:
        return replace(genuine, tree=(*own[:at], own[at]._replace(**changes), *own[at + 1 :]))

    for at in rng.integers(0, len(own), 4).tolist():
        node = own[at]
        for name, forged in perturbed(replace(genuine, tree=(), multipliers=node.multipliers), rng):
            yield f"{name} in a node", with_node(at, multipliers=forged.multipliers)
        yield "another denominator", with_node(at, denominator=max(1, node.denominator // 2))
        yield "a leaf", with_node(at, column=None, zero=0, one=0)
        yield "without multipliers", with_node(at, multipliers={})
        if node.column is None:
            continue
        kind, *numbers = node.column
        numbers[int(rng.integers(3))] += int(rng.choice([-1, 1]))
        yield "another column", with_node(at, column=(kind, *numbers))
        yield "another kind of column", with_node(at, column=("R" if kind == "S" else "S", *node.column[1:]))
        yield "children exchanged", with_node(at, zero=node.one, one=node.zero)
        for child in ("zero", "one"):
            yield "another child", with_node(at, **{child: int(rng.integers(0, len(own) + 1))})
            yield "twins", with_node(at, zero=getattr(node, child), one=getattr(node, child))


def invented(graph: Graph, genuine: BoundCertificate, rng: np.random.Generator) -> BoundCertificate:
    """Multipliers climbed from nothing over every row that the checker takes, to the highest bound that it believes.

    Boundaries are random: the genuine ones leave many kinds of rows out.
    """
    if not genuine.boundaries and genuine.link is None:
        form, at, rows = FORMAT, (), certificate._Rows(relaxed(graph), genuine.budget_bytes, genuine.scope)
    elif genuine.link is None:
        form, at = WINDOW_FORMAT, some_of(range(len(graph) - 1), rng)
        at = sorted({*at, *(t + 1 for t in at if t + 2 < len(graph))}) if rng.random() < 0.7 else at  # with slots
        at = at[:1] if genuine.scope is Scope.FREE else at  # others may not depend on it
        rows = WindowRows(graph, genuine.budget_bytes, at, genuine.scope)
    else:
        form, at = LINK_FORMAT, some_of(sorted([*range(len(graph) - 1), *range(1 - len(graph), 0)], key=place_of), rng)
        rows = LinkRows(graph, genuine.budget_bytes, at, genuine.scope, genuine.link)
    known = [row for row in every_row(graph, form, rows.n_places, genuine.scope, rng) if exists(rows, row)]
    multipliers, best = np.zeros(len(known), dtype=int), graph.least_cost
    for _ in range(CLIMB if known else 0):
        changed = multipliers.copy()
        for i in rng.integers(len(known), size=rng.integers(1, 5)):
            changed[i] = max(0, changed[i] + int(rng.choice([-2, -1, 1, 2, 4])))
        rows.clear()
        for i in np.nonzero(changed)[0].tolist():
            rows.add(known[i][0], known[i][1:], int(changed[i]))
        bound = rows.most(graph.least_cost + -(-rows.value(2) // 2))
        if bound >= best:
            best, multipliers = bound, changed
    chosen: dict[str, list[list[int]]] = {kind: [] for kind in KINDS[form]}
    for (kind, *row), y in zip(known, multipliers.tolist(), strict=True):
        chosen[kind] += [[*row, y]] if y else []
    return replace(genuine, boundaries=at, denominator=2, multipliers=chosen, bound=best)


def some_of(every: Sequence[int], rng: np.random.Generator) -> list[int]:
    """A random part of them, up to six, in their order."""
    some = rng.choice(len(every), int(rng.integers(1, min(len(every), 6) + 1)), replace=False)
    return [every[i] for i in sorted(some.tolist())]


def every_row(
    graph: Graph, form: str, n_places: int, scope: Scope, rng: np.random.Generator
) -> Iterator[tuple[Any, ...]]:  # fmt: skip
    """Every row (kind, ...) that could exist, and many that cannot; knapsack rows of up to three values at random."""
    most = range(max(len(graph), len(graph.values), n_places))
    for kind, width in KINDS[form].items():
        if kind != "knapsack" and (scope is Scope.STAGED or kind not in ("once", "run", "later", "slot")):
            yield from ((kind, *row) for row in itertools.product(range(n_places), *[most] * (width - 1)))
    for t in [*range(n_places)] * 10:
        items = rng.permutation(len(graph.values))[: rng.integers(1, 4)].tolist()
        yield "knapsack", t, int(rng.integers(0, 3)), *(x for v in items for x in (v, int(rng.integers(1, 3))))


def exists(rows: RowSums, row: tuple[Any, ...]) -> bool:
    """Whether the checker takes the row."""
    with suppress(InvalidInput):
        return rows.add(row[0], row[1:], 0)
    return False
