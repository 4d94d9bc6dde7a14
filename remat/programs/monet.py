"""MONeT's integer program as one sparse system: it chooses implementations, stored values and repeats.

A. Shah, C.-Y. Wu, J. Mohan, V. Chidambaram, P. Krähenbühl: "Memory Optimization for Deep Networks", ICLR 2021.
Stage 0 is the forward pass. Stage t = 1 .. m ends with the t-th backward operation; before it, forward operations may
be recomputed, each at most once and in order. Variables, all binary:

    W[t, i, w]   forward operation i is computed in stage t in implementation w; R[t, i] is their sum
    S[t, v]      forward value v is stored across stages t - 1 and t
    M[t, p]      backward operation t runs in implementation p
    SM[t, p, v]  M[t, p] and S[t + 1, v], for the forward values v that implementation p reads

Memory in stage t, beside the gradients that live there; D are the forward values that the backward operation reads:

    (first)   S u D                             at i's place in the order
    (second)  (S u D u L_i) + x_i + workspace   while i is computed
    (third)   (S u D) + y_t + workspace         while the backward operation runs

S is ``S[t + 1, v]`` for values made before i (those that are not stored further are released by then) and ``S[t, v]``
for the other values. L_i are the inputs of i and the values that a branch holds while i runs. The products of binaries
in S u D are linearised as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp

from remat.errors import Skip
from remat.graph import Graph
from remat.implementation import DEFAULT, Implementation
from remat.programs.program import TOLERANCE, Program, Rows, scale_of

LOGIC, MEMORY = range(2)  # kinds of rows


@dataclass(frozen=True, slots=True, eq=False)
class MonetModel:
    """``min cost @ x + cost_constant`` subject to ``matrix @ x >= lower``, x binary.

    Attributes:
        is_memory: [rows] bool, True for rows of memory, in units of bytes.
        computations: [(t, k, implementation, column)] of W and M; column -1 stands for the constant one.
        stored: [t, v] the column of S.
        both: [(column of SM, column of M, column of S)].
    """

    graph: Graph
    matrix: sp.csr_array
    lower: np.ndarray
    cost: np.ndarray
    cost_constant: float
    cost_unit: int
    is_memory: np.ndarray
    computations: tuple[tuple[int, int, str, int], ...]
    stored: dict[tuple[int, int], int]
    both: tuple[tuple[int, int, int], ...]

    @property
    def cost_scale(self) -> float:
        """Scale of the objective: the cost of all default implementations becomes at most `SCALED`."""
        return scale_of(self.graph.total_cost / self.cost_unit)

    def program(self) -> Program:
        """The program for a solver.

        The budget grows by half a unit, which is exact. A large budget, where half a unit is within the solver's
        tolerance, shrinks by a millionth instead.
        """
        largest = max(1.0, float(-self.lower[self.is_memory].min(initial=-1.0)))
        row_scale = np.where(self.is_memory, scale_of(largest), 1.0)
        room = 0.5 if TOLERANCE * largest < 0.5 else -TOLERANCE * largest
        n = len(self.cost)
        return Program(
            matrix=sp.csr_array(sp.diags_array(row_scale) @ self.matrix), cost=self.cost * self.cost_scale,
            upper=np.ones(n), row_lower=(self.lower - np.where(self.is_memory, room, 0.0)) * row_scale,
            is_integer=np.ones(n, dtype=bool), offset=self.cost_constant * self.cost_scale,
        )  # fmt: skip

    def calls(self, x: np.ndarray) -> list[tuple[int, str]]:
        """(operation, implementation) of every computation of a solution, in order."""
        chosen = [entry[:3] for entry in self.computations if entry[3] < 0 or x[entry[3]] > 0.5]
        return [
            (k, "" if implementation == DEFAULT else implementation)
            for _, k, implementation in sorted(chosen, key=lambda entry: entry[:2])
        ]

    def point(self, calls: Iterable[tuple[int, str]]) -> np.ndarray | None:
        """[n] the variables of a plan with these calls, as `calls` gives them; None if the program has no such plan.

        The program repeats only forward operations after the forward pass, in order and each at most once before a
        backward operation, and it may count more memory than the simulator.
        """
        graph, x = self.graph, np.zeros(len(self.cost))
        columns = {entry[:3]: entry[3] for entry in self.computations}
        made: dict[int, int] = {}  # [forward value] the last stage that made it
        known = set[int]()
        ran, stage, latest = 0, 0, -1  # backward operations; the last call
        for k, name in calls:
            own, is_backward = graph.implementation(k, name), graph.operations[k].is_backward
            ran += is_backward
            at = ran if is_backward else ran + 1 if k in known else 0
            known.add(k)
            column = columns.get((at, k, own.name))
            if column is None or at < stage or (at == stage and k <= latest):
                return None
            stage, latest = at, k
            if column >= 0:
                x[column] = 1.0
            needed = [v for v in own.inputs if v in made]
            if not all(self._store(x, v, made[v], at + is_backward) for v in needed if made[v] < at):
                return None
            made |= {} if is_backward else dict.fromkeys(own.outputs, at)
        ends = [v for v in made if graph.values[v].keep]
        if not all(self._store(x, v, made[v], ran + 1) for v in ends):
            return None
        for column, chosen, stored in self.both:
            x[column] = x[chosen] * x[stored]
        program = self.program()
        return x if np.all(program.matrix @ x >= program.row_lower) else None

    def _store(self, x: np.ndarray, v: int, since: int, until: int) -> bool:
        """Store a value after a stage, until the beginning of another one; whether the program has the variables."""
        columns = [self.stored.get((t, v), -1) for t in range(since + 1, until + 1)]
        x[columns] = 1.0
        return -1 not in columns


def estimate_columns(graph: Graph) -> int:
    """Approximate number of variables of the model."""
    forward = [op for op in graph.operations if not op.is_backward]
    stages = len(graph) - len(forward)
    implementations = sum(len(op.all_implementations) for op in forward)
    return stages * (implementations + len(forward)) // 2 + implementations


def build_model(graph: Graph, budget_bytes: int) -> MonetModel:
    """The program of a graph whose forward operations come before all backward ones.

    Raises:
        Skip: there is no backward pass, or it is mixed with the forward one.
    """
    return _Builder(graph, budget_bytes).build()


Choice = list[tuple[Implementation, int]]  # implementations that a computation can use, and their columns


class _Builder:
    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        flags = [op.is_backward for op in graph.operations]
        self.n = flags.index(True) if True in flags else 0
        if not self.n or not all(flags[self.n :]):
            raise Skip("MONeT plans a forward pass followed by a backward pass; this graph is not of that form")
        self.graph = graph
        self.m = len(graph) - self.n  # backward operations; stages 1 .. m
        scratch = (own.workspace_bytes for op in graph.operations for own in op.all_implementations)
        self.unit = math.gcd(*(v.bytes for v in graph.values), *scratch) or 1
        self.size = [value.bytes // self.unit for value in graph.values]
        self.budget = (budget_bytes - graph.fixed_bytes) // self.unit
        self.implementations = [self._usable(k) for k in range(len(graph))]
        self.forward = [v for v, p in enumerate(graph.producer) if p < self.n]
        self.overwriters: dict[int, list[int]] = {}  # forward operations that can write over each value
        for i in range(self.n):
            for v in {own.overwrites for own in self.implementations[i] if own.overwrites is not None}:
                self.overwriters.setdefault(v, []).append(i)
        self.last = self._last_stages()
        self.n_columns = 0
        self.W: dict[tuple[int, int], Choice] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.M: dict[int, Choice] = {}
        self.both: list[tuple[int, int, int]] = []
        self.rows = Rows()

    def _usable(self, k: int) -> tuple[Implementation, ...]:
        """Exact implementations of operation `k`.

        A backward operation runs once. So its implementation must also make all kept outputs, and may write only over
        a gradient that is neither kept nor read later.
        """
        graph = self.graph
        exact = [own for own in graph.operations[k].all_implementations if not own.is_lossy]
        if k >= self.n:
            kept = {v for v in graph.operations[k].outputs if graph.values[v].keep}
            exact = [own for own in exact if kept.issubset(own.outputs) and self._may_overwrite(k, own.overwrites)]
        return tuple(exact)

    def _may_overwrite(self, k: int, v: int | None) -> bool:
        if v is None:
            return True
        later = (own for op in self.graph.operations[k + 1 :] for own in op.all_implementations)
        is_gradient = self.graph.producer[v] >= self.n
        return is_gradient and not self.graph.values[v].keep and not any(v in own.inputs for own in later)

    def _last_stages(self) -> list[int]:
        """[n] last stage in which a run of each forward operation can be useful."""
        last = [0] * self.n
        for k in range(len(self.graph) - 1, -1, -1):
            for implementation in self.implementations[k]:
                for v in self._forward_inputs(implementation):
                    p = self.graph.producer[v]
                    last[p] = max(last[p], k - self.n + 1 if k >= self.n else last[k])
        for v in self.forward:
            if self.graph.values[v].keep:
                last[self.graph.producer[v]] = self.m + 1
        return last

    def _new(self) -> int:
        self.n_columns += 1
        return self.n_columns - 1

    def _choice(self, k: int, is_required: bool) -> Choice:
        """Columns for a computation of operation `k`; -1, the constant one, where nothing is left to choose."""
        implementations = self.implementations[k]
        is_fixed = is_required and len(implementations) == 1
        return [(implementation, -1 if is_fixed else self._new()) for implementation in implementations]

    def build(self) -> MonetModel:
        graph, n = self.graph, self.n
        for t in range(self.m + 1):
            for i in range(n):
                if t == 0 or (t <= self.last[i] and not graph.operations[i].run_once):
                    self.W[t, i] = self._choice(i, is_required=t == 0)
            if t:
                self.M[t] = self._choice(n + t - 1, is_required=True)
        for v in self.forward:
            for t in range(1, self.m + 2):
                if t <= self.last[graph.producer[v]] + 1:  # a value that is read in a stage is stored across its end
                    self.S[t, v] = self._new()
        self._choices()
        self._stores()
        self._dependencies()
        self._memory()
        cost_unit = math.gcd(*(own.cost for implementations in self.implementations for own in implementations)) or 1
        cost, constant = np.zeros(self.n_columns), 0.0
        computations = []
        choices = {**self.W, **{(t, n + t - 1): choice for t, choice in self.M.items()}}
        for (t, k), choice in choices.items():
            for implementation, column in choice:
                computations.append((t, k, implementation.name, column))
                if column < 0:
                    constant += implementation.cost // cost_unit
                else:
                    cost[column] = implementation.cost // cost_unit
        return MonetModel(
            graph, self.rows.matrix(self.n_columns), np.array(self.rows.lower), cost, constant, cost_unit,
            np.array(self.rows.kind) == MEMORY, tuple(computations), self.S, tuple(self.both),
        )  # fmt: skip

    def _add(self, terms: Iterable[tuple[int, float]], limit: float, kind: int = LOGIC) -> None:
        """Add a row ``terms <= limit``. Column -1 is the constant one: its terms move to the other side."""
        merged: dict[int, float] = {}
        for column, value in terms:
            if column < 0:
                limit -= value
            else:
                merged[column] = merged.get(column, 0.0) + value
        if merged or limit < 0:
            self.rows.add(_minus(merged.items()), -limit, kind)

    def _made(self, t: int, v: int) -> list[tuple[int, float]]:
        """Terms whose sum is one if `v` is made in stage `t`."""
        return [(column, 1.0) for own, column in self.W.get((t, self.graph.producer[v]), ()) if v in own.outputs]

    def _overwritten(self, t: int, v: int, before: int) -> list[tuple[int, float]]:
        """Terms whose sum is one if an operation before `before` writes over `v` in stage `t`."""
        operations = (i for i in self.overwriters.get(v, ()) if i < before)
        return [(column, 1.0) for i in operations for own, column in self.W.get((t, i), ()) if own.overwrites == v]

    def _stored(self, t: int, v: int) -> list[tuple[int, float]]:
        return [(self.S[t, v], 1.0)] if (t, v) in self.S else []

    def _choices(self) -> None:
        """One implementation for each computation; all operations run in stage 0, each at most once in later stages."""
        choices = [(choice, t == 0) for (t, _), choice in self.W.items()]
        choices += [(choice, True) for choice in self.M.values()]
        for choice, is_required in choices:
            free = [(column, 1.0) for _, column in choice if column >= 0]
            if free:
                self._add(free, 1)
                if is_required:
                    self._add(_minus(free), -1)

    def _stores(self) -> None:
        """A stored value was stored or made in the stage before, and not written over there."""
        for (t, v), column in self.S.items():
            before = [*self._made(t - 1, v), *self._stored(t - 1, v)]
            self._add([(column, 1.0), *_minus(before)], 0)
            over = self._overwritten(t - 1, v, self.n)
            if over:
                self._add([(column, 1.0), *over], 1)
        for v in self.forward:
            if self.graph.values[v].keep:
                self._add([(self.S[self.m + 1, v], -1.0)], -1)

    def _dependencies(self) -> None:
        """Every input of a computation is stored, or made before it in its stage, and not written over."""
        for (t, i), choice in self.W.items():
            for implementation, column in choice:
                for v in implementation.inputs:
                    over = self._overwritten(t, v, i)
                    available = [*self._made(t, v), *self._stored(t, v), *_minus(over)]
                    self._add([(column, 1.0), *_minus(available)], 0)
                    if over:  # a value that is stored and made again has only one copy
                        self._add([(column, 1.0), *over], 1)
        for t, choice in self.M.items():
            for implementation, column in choice:
                for v in implementation.inputs:
                    p = self.graph.producer[v]
                    if p >= self.n:
                        made = [(other, -1.0) for own, other in self.M[p - self.n + 1] if v in own.outputs]
                        self._add([(column, 1.0), *made], 0)
                for v in self._forward_inputs(implementation):
                    over = self._overwritten(t, v, self.n)
                    available = [*self._made(t, v), *self._stored(t + 1, v), *_minus(over)]
                    self._add([(column, 1.0), *_minus(available)], 0)

    def _forward_inputs(self, implementation: Implementation) -> list[int]:
        return [v for v in implementation.inputs if self.graph.producer[v] < self.n]

    def _memory(self) -> None:
        live, local, latest = self._gradients(), self._locals(), max(self.last)
        for t in range(self.m + 1):
            shared = self._products(t)
            for i in range(self.n):
                if (t, i) in self.W or t <= latest:
                    self._forward_memory(t, i, local[i], live[t], shared)
            if t:
                self._backward_memory(t, live[t], shared)

    def _products(self, t: int) -> dict[tuple[int, int], int]:
        """(column of M, v) -> column that is one if the backward operation runs with it and v is stored after it."""
        products = {}
        for implementation, column in self.M.get(t, ()):
            for v in self._forward_inputs(implementation):
                if (t + 1, v) not in self.S:
                    continue
                stored = self.S[t + 1, v]
                if column < 0:
                    products[column, v] = stored
                    continue
                both = products[column, v] = self._new()
                self.both.append((both, column, stored))
                self._add([(both, 1.0), (column, -1.0)], 0)
                self._add([(both, 1.0), (stored, -1.0)], 0)
                self._add([(column, 1.0), (stored, 1.0), (both, -1.0)], 1)
        return products

    def _read_back(self, t: int, i: int, without: set[int], shared: dict[tuple[int, int], int]) -> list:
        """Terms for the bytes that stage `t`'s backward operation reads of values made before `i`.

        Stored values and those in `without` do not count.
        """
        terms = []
        for implementation, column in self.M.get(t, ()):
            for v in self._forward_inputs(implementation):
                if self.graph.producer[v] < i and v not in without:
                    terms.append((column, self.size[v]))
                    if (column, v) in shared:
                        terms.append((shared[column, v], -self.size[v]))
        return terms

    def _forward_memory(self, t: int, i: int, local: set[int], live: int, shared: dict[tuple[int, int], int]) -> None:
        producer, size = self.graph.producer, self.size

        def held(without: set[int]) -> list[tuple[int, float]]:
            terms = self._read_back(t, i, without, shared)
            for v in self.forward:
                column = self.S.get((t + 1 if producer[v] < i else t, v))
                if column is not None and v not in without and size[v]:
                    terms.append((column, size[v]))
            return terms

        self._add(held(set()), self.budget - live, MEMORY)
        if (t, i) not in self.W:
            return
        terms = held(local)
        for implementation, column in self.W[t, i]:
            # Inputs read only by this implementation count twice if stored: this overestimates, never underestimates.
            inputs = local.union(implementation.inputs)
            needed = sum(size[v] for v in inputs) + self._made_units(implementation)
            terms.append((column, needed))
        self._add(terms, self.budget - live, MEMORY)

    def _backward_memory(self, t: int, live: int, shared: dict[tuple[int, int], int]) -> None:
        size = self.size
        terms = self._read_back(t, self.n, set(), shared)
        terms += [(self.S[t + 1, v], size[v]) for v in self.forward if (t + 1, v) in self.S and size[v]]
        terms += [(column, self._made_units(implementation)) for implementation, column in self.M[t]]
        self._add(terms, self.budget - live, MEMORY)

    def _made_units(self, implementation: Implementation) -> int:
        """Size of the outputs and the workspace, less the value that is written over."""
        made = sum(self.size[v] for v in implementation.outputs) + implementation.workspace_bytes // self.unit
        return made - (0 if implementation.overwrites is None else self.size[implementation.overwrites])

    def _gradients(self) -> list[int]:
        """[m + 1] size of the backward values that each stage holds before its backward operation makes new ones."""
        graph = self.graph
        live = [0] * (self.m + 1)
        for v, p in enumerate(graph.producer):
            if p < self.n:
                continue
            readers = [k for k in range(p + 1, len(graph)) if any(v in own.inputs for own in self.implementations[k])]
            end = self.m if graph.values[v].keep else max(readers, default=p) - self.n + 1
            for t in range(p - self.n + 2, end + 1):
                live[t] += self.size[v]
        return live

    def _locals(self) -> list[set[int]]:
        """[n] default inputs of each forward operation, and values of a branch that a later operation still reads."""
        graph = self.graph
        local = [set(op.inputs) for op in graph.operations[: self.n]]
        for v in self.forward:
            last_user = max((k for k in graph.users[v] if k < self.n), default=0)
            for i in range(graph.producer[v] + 1, last_user):
                local[i].add(v)
        return local


def _minus(terms: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(column, -value) for column, value in terms]
