"""How two programs grow with implementations: Checkmate's with a choice for each computation, and MONeT's.

Every convolution gets more and more algorithms, which read and make the same values, but differ in time and workspace.
Both linear relaxations are solved at the largest budget.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from experiments.monet.cases import NONE, Context, budgets_of, graph_of
from experiments.store import code_of
from remat.graph import Graph, Operation
from remat.implementation import Implementation
from remat.programs.highs import interior_point
from remat.programs.monet import build_model
from remat.programs.program import Program, Rows, scale_of

NETWORKS = ("vgg16", "unet")
ALGORITHMS = (1, 2, 4, 8)  # of each convolution, the default one included
STEP_BYTES, FASTER = 1 << 26, 0.05  # workspace of one algorithm more than of the one before it, and time it saves
LP_SHARE = 4  # of the time limit of a solve


def run(context: Context) -> dict[str, Any]:
    """Sizes and seconds of both programs for each number of algorithms."""
    rows = list[dict[str, Any]]()
    limit = LP_SHARE * context.scale.time_limit_s
    for network in (one for one in context.networks if one.name in NETWORKS):
        plain, budget = graph_of(context, network, NONE), budgets_of(context, network)[0]
        for algorithms in ALGORITHMS:
            graph = with_algorithms(plain, algorithms)
            for name, build in PROGRAMS.items():
                determines = {"program": name, "graph": graph.sha256(), "budget": budget, "limit": limit,
                              "code": code_of("monet", whole=True)}  # fmt: skip
                sizes = context.store.remember("growth", determines, partial(measured, build, graph, budget, limit))
                rows.append({"network": network.label, "algorithms": algorithms, "program": name, **sizes})
                context.print(f"{network.label}, {algorithms} algorithms, {name}: {sizes['rows']:,} rows")
    return {"rows": rows, "limit_s": limit}


def with_algorithms(graph: Graph, n: int) -> Graph:
    """The graph with `n` implementations of each convolution and its gradients."""

    def chosen(op: Operation) -> Operation:
        if "convolution" not in op.kind or not op.cost:
            return op
        others = tuple(
            Implementation(f"algorithm_{i}", op.inputs, op.outputs, round((1 - FASTER * i) * op.cost), i * STEP_BYTES)
            for i in range(1, n)
        )
        return replace(op, implementations=others)

    return replace(graph, name=f"{graph.name}_{n}_algorithms", operations=tuple(map(chosen, graph.operations)))


def measured(
    build: Callable[[Graph, int], Program], graph: Graph, budget_bytes: int, limit_s: float
) -> dict[str, Any]:  # fmt: skip
    """Rows, columns and entries of a program, and the seconds of its relaxation; None if that did not end in time."""
    program = build(graph, budget_bytes)
    began = time.monotonic()
    solved = interior_point(replace(program, is_integer=None), limit_s)
    seconds = time.monotonic() - began
    return {"rows": len(program.row_lower), "columns": len(program.cost), "entries": program.matrix.nnz,
            "lp_s": None if solved is None else seconds}  # fmt: skip


def monet_program(graph: Graph, budget_bytes: int) -> Program:
    """MONeT's own program."""
    return build_model(graph, budget_bytes).program()


def checkmate_program(graph: Graph, budget_bytes: int) -> Program:
    """Checkmate's program with a choice of implementation for each computation, as one would add it.

    The names are those of `remat.programs.published`: R has a third index, the implementation; every other variable and
    constraint takes the sum over it, except (1b), which each implementation needs for its own inputs. Implementations
    that work in place are left out.
    """
    return _Checkmate(graph, budget_bytes).program()


PROGRAMS: dict[str, Callable[[Graph, int], Program]] = {
    "Checkmate's with choices": checkmate_program, "MONeT's": monet_program,
}  # fmt: skip
Terms = list[tuple[int, float]]


class _Checkmate:
    """The columns and rows of `checkmate_program`; all rows are ``terms >= lower``."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph, self.rows, self.n_columns = graph, Rows(), 0
        scratch = (own.workspace_bytes for op in graph.operations for own in op.all_implementations)
        unit = math.gcd(*(v.bytes for v in graph.values), *scratch) or 1
        room = (budget_bytes - graph.fixed_bytes) // unit
        self.scale, self.room = scale_of(room) / unit, scale_of(room) * (room + 0.5)
        self.ways = [[own for own in op.all_implementations if own.overwrites is None] for op in graph.operations]
        stages = range(len(graph))
        self.R = {(t, k, w): self._new() for t in stages for k in range(t + 1) for w in range(len(self.ways[k]))}
        self.S = {(t, v): self._new() for t in stages for v, p in enumerate(graph.producer) if p < t}
        self.F = {
            (t, v, k): self._new() for v, p in enumerate(graph.producer) for k in (p, *graph.users[v])
            for t in range(k, len(graph)) if graph.values[v].bytes
        }  # fmt: skip
        self.n_binary = self.n_columns
        self.U = {(t, k): self._new() for t in stages for k in range(t + 1)}

    def _new(self) -> int:
        self.n_columns += 1
        return self.n_columns - 1

    def _runs(self, t: int, k: int, factor: float = 1.0, makes: int | None = None) -> Terms:
        """Terms of the sum of R[t, k] over its implementations, or over those that make a value."""
        return [
            (self.R[t, k, w], factor) for w, own in enumerate(self.ways[k]) if makes is None or makes in own.outputs
        ]

    def _held(self, t: int, v: int, factor: float = 1.0) -> Terms:
        return [(self.S[t, v], factor)] if (t, v) in self.S else []

    def program(self) -> Program:
        """The whole program."""
        for t in range(len(self.graph)):
            for k in range(t + 1):
                self._computation(t, k)
                self._memory(t, k)
        for t, v in self.S:  # (1c)
            made = self._runs(t - 1, self.graph.producer[v], makes=v)
            self.rows.add([*made, *self._held(t - 1, v), *self._held(t, v, -1.0)], 0)
        for v, value in enumerate(self.graph.values):  # kept values: (1c) once more, as if a stage followed the last
            if value.keep:
                last = len(self.graph) - 1
                self.rows.add([*self._runs(last, self.graph.producer[v], makes=v), *self._held(last, v)], 1)
        for t, v, k in self.F:
            self._freed(t, v, k)
        cost, unit = np.zeros(self.n_columns), scale_of(self.graph.total_cost)
        for (_, k, w), column in self.R.items():
            cost[column] = self.ways[k][w].cost * unit
        binary = np.arange(self.n_columns) < self.n_binary
        return Program(
            self.rows.matrix(self.n_columns), cost, np.where(binary, 1.0, np.inf), np.array(self.rows.lower), binary
        )

    def _computation(self, t: int, k: int) -> None:
        """One implementation at most, exactly one in the operation's own stage (8), and the inputs of each (1b)."""
        self.rows.add(self._runs(t, k, -1.0), -1)
        if t == k:
            self.rows.add(self._runs(t, k), 1)
        for w, own in enumerate(self.ways[k]):
            for v in own.inputs:
                made = self._runs(t, self.graph.producer[v], makes=v)
                self.rows.add([*made, *self._held(t, v), (self.R[t, k, w], -1.0)], 0)

    def _memory(self, t: int, k: int) -> None:
        """(2), (3): U holds what was there, less what was freed, and what k makes; (9): it meets the budget."""
        graph, terms = self.graph, [(self.U[t, k], 1.0)]
        for w, own in enumerate(self.ways[k]):
            terms.append((self.R[t, k, w], -self.scale * sum(graph.values[v].bytes for v in own.outputs)))
        if k:
            terms.append((self.U[t, k - 1], -1.0))
            touched = {*graph.operations[k - 1].inputs, *graph.operations[k - 1].outputs}
            freed = [
                (self.F[t, v, k - 1], self.scale * graph.values[v].bytes) for v in touched if (t, v, k - 1) in self.F
            ]
            terms += freed
        else:
            terms += [
                (self.S[t, v], -self.scale * value.bytes) for v, value in enumerate(graph.values) if (t, v) in self.S
            ]
        self.rows.add(terms, 0)
        scratch = [(self.R[t, k, w], -self.scale * own.workspace_bytes) for w, own in enumerate(self.ways[k])]
        self.rows.add([(self.U[t, k], -1.0), *scratch], -self.room)

    def _freed(self, t: int, v: int, k: int) -> None:
        """(6), (7): v is freed right after k if k runs, none later in the stage reads it, and the next one lacks it."""
        later = [j for j in self.graph.users[v] if k < j <= t]
        hazards: Terms = [*self._runs(t, k, -1.0), *self._held(t + 1, v)]
        hazards += [term for j in later for term in self._runs(t, j)]
        is_kept = t + 1 == len(self.graph) and self.graph.values[v].keep
        most = 2 + len(later)
        self.rows.add([*hazards, (self.F[t, v, k], 1.0)], -is_kept)
        negated = [(column, -factor) for column, factor in hazards]
        self.rows.add([*negated, (self.F[t, v, k], -most)], 1 + is_kept - most)
