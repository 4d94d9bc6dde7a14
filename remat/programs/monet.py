"""MONeT's integer program as one sparse system: which implementation, what to store, what to rebuild.

A. Shah, C.-Y. Wu, J. Mohan, V. Chidambaram, P. Krähenbühl: "Memory Optimization for Deep Networks", ICLR 2021.
Stage 0 is the forward pass, stage t = 1 .. m is the t-th backward operation, before which forward
operations may be computed again, each at most once and in order. Variables, all binary:

    W[t, i, w]   forward operation i is computed in stage t in implementation w; R[t, i] is their sum
    S[t, v]      forward value v is stored across stages t - 1 and t
    M[t, p]      backward operation t runs in implementation p
    SM[t, p, v]  M[t, p] and S[t + 1, v], for the forward values v that implementation p reads

Memory in stage t, with G the gradients that live there and D the forward values that the backward operation reads:

    (first)   S                          stored values while i's place is passed
    (second)  (S u D u L_i) + x_i + workspace   while i is computed
    (third)   (S u D) + y_t + workspace         while the backward operation runs

where S is ``S[t + 1, v]`` of values made before i (what else was stored is released as i's place is passed) and
``S[t, v]`` of the others, and L_i is what i reads and what a branch holds while i runs. The products of
binaries in S u D are linearised as in the paper.
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
        is_memory: [rows] bool, which rows are of memory, in units of bytes.
        works: [(t, i, implementation, column)] of W; `runs` of M; a column of -1 is fixed to one.
    """

    graph: Graph
    matrix: sp.csr_array
    lower: np.ndarray
    cost: np.ndarray
    cost_constant: float
    cost_unit: int
    is_memory: np.ndarray
    n_forward: int
    works: tuple[tuple[int, int, str, int], ...]
    runs: tuple[tuple[int, int, str, int], ...]

    @property
    def cost_scale(self) -> float:
        """Of the objective: the cost of all default implementations becomes at most `SCALED`."""
        return scale_of(self.graph.total_cost / self.cost_unit)

    def program(self) -> Program:
        """The program for a solver; the budget gets half a unit of room, which is exact, or a millionth less of it."""
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
        chosen = [entry for entry in (*self.works, *self.runs) if entry[3] < 0 or x[entry[3]] > 0.5]
        return [
            (k, "" if implementation == DEFAULT else implementation)
            for _, k, implementation, _ in sorted(chosen, key=lambda e: (e[0], e[1]))
        ]


def estimate_columns(graph: Graph) -> int:
    """About how many variables the model has."""
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
        self.overwriters = self._overwriters()
        self.last = self._last_stages()
        self.n_columns = 0
        self.W: dict[tuple[int, int], dict[str, int]] = {}
        self.S: dict[tuple[int, int], int] = {}
        self.M: dict[int, dict[str, int]] = {}
        self.rows = Rows()

    def _usable(self, k: int) -> tuple[Implementation, ...]:
        """Exact implementations of operation `k`; of a backward one, which runs once, those that leave what is needed.

        That is: make what is kept, and write over nothing that is kept or read later.
        """
        graph = self.graph
        kept = {v for v in graph.operations[k].outputs if graph.values[v].keep}
        usable = []
        for implementation in graph.operations[k].all_implementations:
            x = implementation.overwrites
            needed = x is not None and (
                graph.values[x].keep
                or any(
                    x in other.inputs
                    for j in range(k + 1, len(graph))
                    for other in graph.operations[j].all_implementations
                )
            )
            is_gradient = x is not None and graph.producer[x] >= self.n
            if implementation.is_lossy or (k >= self.n and x is not None and (needed or not is_gradient)):
                continue
            if k >= self.n and not kept.issubset(implementation.outputs):
                continue
            usable.append(implementation)
        return tuple(usable)

    def _last_stages(self) -> list[int]:
        """[n] last stage in which each forward operation can be of use."""
        last = [0] * self.n
        for k in range(len(self.graph) - 1, -1, -1):
            for implementation in self.implementations[k]:
                for v in implementation.inputs:
                    p = self.graph.producer[v]
                    if p < self.n:
                        last[p] = max(last[p], k - self.n + 1 if k >= self.n else last[k])
        for v in self.forward:
            if self.graph.values[v].keep:
                last[self.graph.producer[v]] = self.m + 1
        return last

    def _new(self) -> int:
        self.n_columns += 1
        return self.n_columns - 1

    def build(self) -> MonetModel:
        graph, n = self.graph, self.n
        works, runs = [], []
        for t in range(self.m + 1):
            for i in range(n):
                repeats = t <= min(self.last[i], self.m) and not graph.operations[i].run_once
                if t == 0 or repeats:
                    fixed = t == 0 and len(self.implementations[i]) == 1
                    self.W[t, i] = {
                        implementation.name: -1 if fixed else self._new() for implementation in self.implementations[i]
                    }
                    works += [(t, i, name, column) for name, column in self.W[t, i].items()]
            if t:
                implementations = self.implementations[n + t - 1]
                self.M[t] = {
                    implementation.name: -1 if len(implementations) == 1 else self._new()
                    for implementation in implementations
                }
                runs += [(t, n + t - 1, name, column) for name, column in self.M[t].items()]
        for v in self.forward:
            for t in range(1, self.m + 2):
                if t <= self.last[graph.producer[v]] + 1:  # what is read in a stage is stored across its end
                    self.S[t, v] = self._new()
        self._choices()
        self._stores()
        self._dependencies()
        self._memory()
        cost_unit = (
            math.gcd(
                *(implementation.cost for implementations in self.implementations for implementation in implementations)
            )
            or 1
        )
        cost, constant = np.zeros(self.n_columns), 0.0
        for _, k, name, column in (*works, *runs):
            price = graph.implementation(k, name).cost // cost_unit
            if column < 0:
                constant += price
            else:
                cost[column] = price
        return MonetModel(
            graph, self.rows.matrix(self.n_columns), np.array(self.rows.lower), cost, constant, cost_unit,
            np.array(self.rows.kind) == MEMORY, n, tuple(works), tuple(runs),
        )  # fmt: skip

    def _add(self, terms: Iterable[tuple[int, float]], limit: float, kind: int = LOGIC) -> None:
        """A row ``terms <= limit``. A term of column -1 is the constant one: it moves to the other side."""
        merged: dict[int, float] = {}
        for column, value in terms:
            if column < 0:
                limit -= value
            else:
                merged[column] = merged.get(column, 0.0) + value
        if merged or limit < 0:
            self.rows.add(_minus(merged.items()), -limit, kind)

    def _made(self, t: int, v: int) -> list[tuple[int, float]]:
        """Terms that are one if `v` is made in stage `t`."""
        p = self.graph.producer[v]
        columns = self.W.get((t, p), {})
        return [
            (columns[implementation.name], 1.0)
            for implementation in self.implementations[p]
            if implementation.name in columns and v in implementation.outputs
        ]

    def _overwritten(self, t: int, v: int, before: int) -> list[tuple[int, float]]:
        """Terms that are one if an operation before `before` writes over `v` in stage `t`."""
        return [
            (self.W[t, i][implementation.name], 1.0)
            for i, implementation in self.overwriters.get(v, ()) if i < before and (t, i) in self.W
        ]  # fmt: skip

    def _overwriters(self) -> dict[int, list[tuple[int, Implementation]]]:
        """{value: (forward operation, implementation of it) that writes over it}, in order."""
        found: dict[int, list[tuple[int, Implementation]]] = {}
        for i in range(self.n):
            for implementation in self.implementations[i]:
                if implementation.overwrites is not None:
                    found.setdefault(implementation.overwrites, []).append((i, implementation))
        return found

    def _stored(self, t: int, v: int) -> list[tuple[int, float]]:
        return [(self.S[t, v], 1.0)] if (t, v) in self.S else []

    def _choices(self) -> None:
        """One implementation for each computation: all operations in stage 0, each at most once later."""
        for (t, _), columns in self.W.items():
            free = [(c, 1.0) for c in columns.values() if c >= 0]
            if free:
                self._add(free, 1)
                if t == 0:
                    self._add([(c, -1.0) for c, _ in free], -1)
        for columns in self.M.values():
            free = [(c, 1.0) for c in columns.values() if c >= 0]
            if free:
                self._add(free, 1)
                self._add([(c, -1.0) for c, _ in free], -1)

    def _stores(self) -> None:
        """What is stored was stored or made in the stage before, and not written over there."""
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
        for (t, i), columns in self.W.items():
            for implementation in self.implementations[i]:
                for v in implementation.inputs:
                    there = [*self._made(t, v), *self._stored(t, v), *_minus(self._overwritten(t, v, i))]
                    self._add([(columns[implementation.name], 1.0), *_minus(there)], 0)
                    over = self._overwritten(t, v, i)
                    if over:  # where it was stored and made again, both copies are one
                        self._add([(columns[implementation.name], 1.0), *over], 1)
        for t, columns in self.M.items():
            for implementation in self.implementations[self.n + t - 1]:
                for v in implementation.inputs:
                    p = self.graph.producer[v]
                    if p >= self.n:
                        made = [
                            (self.M[p - self.n + 1][w.name], -1.0) for w in self.implementations[p] if v in w.outputs
                        ]
                        self._add([(columns[implementation.name], 1.0), *made], 0)
                for v in self._forward_inputs(implementation):
                    over = self._overwritten(t, v, self.n)
                    there = [*self._made(t, v), *self._stored(t + 1, v), *_minus(over)]
                    self._add([(columns[implementation.name], 1.0), *_minus(there)], 0)

    def _forward_inputs(self, implementation: Implementation) -> list[int]:
        return [v for v in implementation.inputs if self.graph.producer[v] < self.n]

    def _memory(self) -> None:
        live = self._gradients()
        local = self._locals()
        for t in range(self.m + 1):
            shared = self._products(t)
            for i in range(self.n):
                if (t, i) not in self.W and t > max(self.last):
                    continue
                self._forward_memory(t, i, local[i], live[t], shared)
            if t:
                self._backward_memory(t, live[t], shared)

    def _products(self, t: int) -> dict[tuple[str, int], int]:
        """(implementation, v) -> the column that is one if the backward operation runs so and v is stored after it."""
        products = {}
        for implementation in self.implementations[self.n + t - 1] if t else ():
            column = self.M[t][implementation.name]
            for v in self._forward_inputs(implementation):
                if (t + 1, v) not in self.S:
                    continue
                stored = self.S[t + 1, v]
                if column < 0:
                    products[implementation.name, v] = stored
                    continue
                both = products[implementation.name, v] = self._new()
                self._add([(both, 1.0), (column, -1.0)], 0)
                self._add([(both, 1.0), (stored, -1.0)], 0)
                self._add([(column, 1.0), (stored, 1.0), (both, -1.0)], 1)
        return products

    def _read_back(self, t: int, i: int, without: set[int], shared: dict[tuple[str, int], int]) -> list:
        """Bytes of what the backward operation reads, made before `i`, beyond what is stored; not of `without`."""
        terms = []
        for implementation in self.implementations[self.n + t - 1] if t else ():
            for v in self._forward_inputs(implementation):
                if self.graph.producer[v] < i and v not in without:
                    terms.append((self.M[t][implementation.name], self.size[v]))
                    if (implementation.name, v) in shared:
                        terms.append((shared[implementation.name, v], -self.size[v]))
        return terms

    def _forward_memory(self, t: int, i: int, local: set[int], live: int, shared: dict[tuple[str, int], int]) -> None:
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
        needed = sum(size[v] for v in local)
        for implementation in self.implementations[i]:
            # What this implementation alone reads counts beside its being stored: more than it is, never less.
            read = sum(size[v] for v in implementation.inputs if v not in local)
            new = (
                needed
                + read
                + sum(size[v] for v in implementation.outputs)
                + implementation.workspace_bytes // self.unit
            )
            new -= 0 if implementation.overwrites is None else size[implementation.overwrites]
            terms.append((self.W[t, i][implementation.name], new))
        self._add(terms, self.budget - live, MEMORY)

    def _backward_memory(self, t: int, live: int, shared: dict[tuple[str, int], int]) -> None:
        k, size = self.n + t - 1, self.size
        terms = self._read_back(t, self.n, set(), shared)
        terms += [(self.S[t + 1, v], size[v]) for v in self.forward if (t + 1, v) in self.S and size[v]]
        for implementation in self.implementations[k]:
            new = sum(size[v] for v in implementation.outputs) + implementation.workspace_bytes // self.unit
            new -= 0 if implementation.overwrites is None else size[implementation.overwrites]
            terms.append((self.M[t][implementation.name], new))
        self._add(terms, self.budget - live, MEMORY)

    def _gradients(self) -> list[int]:
        """[m + 1] size of the backward values held in each stage before its backward operation makes new ones."""
        graph = self.graph
        live = [0] * (self.m + 1)
        for v, p in enumerate(graph.producer):
            if p < self.n:
                continue
            readers = [
                k
                for k in range(p + 1, len(graph))
                if any(v in implementation.inputs for implementation in self.implementations[k])
            ]
            end = self.m if graph.values[v].keep else max(readers, default=p) - self.n + 1
            for t in range(p - self.n + 2, end + 1):
                live[t] += self.size[v]
        return live

    def _locals(self) -> list[set[int]]:
        """[n] what each forward operation reads by default, and what a later one still has to read of a branch."""
        graph = self.graph
        local = [set(op.inputs) for op in graph.operations[: self.n]]
        for v in self.forward:
            users = [k for k in graph.users[v] if k < self.n]
            for i in range(graph.producer[v] + 1, max(users, default=0)):
                local[i].add(v)
        return local


def _minus(terms: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(column, -value) for column, value in terms]
