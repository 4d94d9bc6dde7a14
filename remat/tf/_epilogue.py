"""Where the state changes of a step run: each as early as its inputs and the other computations allow.

A gradient that is applied at once need not be held to the end of the step. A state change waits for

* the loss and every check, so that an exception in the network or the loss leaves every variable as it was;
* the last computation that reads the variable, repeats included, so that no repeat reads an updated variable;
* the earlier state changes of the trace that concern the same variable.

An operation that only leads to a state change, with results no smaller than any of its inputs, runs right before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from remat.graph import Graph, reached
from remat.tf._nested import changes_state
from remat.tf.operation_graph import StepReader


class Epilogue:
    """The order of the epilogue's operations among planned ones in any order.

    Args:
        graph: the whole step; its first `n_planned` operations are planned, the others are the epilogue.
        nodes: [N] the ``tf.Operation`` behind each operation.
    """

    def __init__(self, graph: Graph, n_planned: int, nodes: Sequence[Any], reader: StepReader) -> None:
        self.n_planned, self.n = n_planned, len(graph)
        # TensorFlow's checks are stateful operations
        checks = [k for k in range(n_planned) if changes_state(nodes[k])]
        self._before_all = checks if graph.loss is None else [graph.loss, *checks]
        # for each operation of the epilogue
        self._sources: list[list[int]] = []  # operations whose results it reads
        self._readers: list[list[int]] = []  # planned operations that read a variable which it changes
        self._earlier: list[list[int]] = []  # operations of the epilogue that come before it
        self._read(graph, nodes, reader)
        self._successors: list[list[int]] = [[] for _ in self._sources]
        for i, (sources, earlier) in enumerate(zip(self._sources, self._earlier, strict=True)):
            for k in (*sources, *earlier):
                if k >= n_planned:
                    self._successors[k - n_planned].append(i + n_planned)
        self._waits = [not changes_state(nodes[k]) and not _shrinks(graph, k) for k in range(n_planned, self.n)]

    def _read(self, graph: Graph, nodes: Sequence[Any], reader: StepReader) -> None:
        planned_readers: dict[str, list[int]] = {}  # by handle
        for k in range(self.n_planned):
            for handle in reader.handles(nodes[k]) | reader.contents(nodes[k]):
                planned_readers.setdefault(handle, []).append(k)
        write: dict[str, int] = {}  # handle -> the last write so far
        reads: dict[str, list[int]] = {}  # handle -> reads since then
        barrier: list[int] = []
        for k in range(self.n_planned, self.n):
            op, given, read = nodes[k], reader.handles(nodes[k]), reader.contents(nodes[k])
            written = reader.written(op)
            earlier = barrier + [write[h] for h in given | read if h in write]
            for handle in (given | read) - written:
                reads.setdefault(handle, []).append(k)
            for handle in written:
                earlier += reads.pop(handle, [])
                write[handle] = k
            if not written and changes_state(op):
                earlier, barrier = list(range(self.n_planned, k)), [k]
            self._sources.append([graph.producer[v] for v in graph.operations[k].inputs])
            self._readers.append([p for handle in written for p in planned_readers.get(handle, [])])
            self._earlier.append(earlier)

    def merged(self, planned: Sequence[int]) -> list[int]:
        """The whole step: the `planned` computations, and among them every operation of the epilogue once."""
        last = {k: at for at, k in enumerate(planned)}
        first = {k: at for at, k in reversed(list(enumerate(planned)))}
        start = max((first[k] for k in self._before_all), default=-1)
        place: dict[int, int] = {}  # operation of the epilogue -> the computation after which it runs
        for k in range(self.n_planned, self.n):
            i = k - self.n_planned
            waits = [first[s] if s < self.n_planned else place[s] for s in self._sources[i]]
            waits += [last[r] for r in self._readers[i]] + [place[e] for e in self._earlier[i]]
            place[k] = max([start, *waits])
        for k in reversed(range(self.n_planned, self.n)):
            i = k - self.n_planned
            if self._waits[i]:
                place[k] = min((place[s] for s in self._successors[i]), default=len(planned) - 1)
        after: list[list[int]] = [[] for _ in range(len(planned) + 1)]
        for k, at in place.items():
            after[at + 1].append(k)
        return after[0] + [x for at, k in enumerate(planned) for x in (k, *after[at + 1])]

    def for_solvers(self, graph: Graph, planned: Graph, small_bytes: int) -> Graph:
        """`planned` (a part of `graph`) for solvers: a gradient is freed as soon as it is computed.

        Its operation waits for the loss and for the backward operations that read the variable, so that the gradient
        can be applied then: their results are further inputs of it, and they run once. Gradients of up to `small_bytes`
        are kept as they are.
        """
        released = {v for v in self._released(graph) if graph.values[v].bytes > small_bytes}
        inputs: dict[int, set[int]] = {graph.producer[v]: set() for v in released}
        for k, more in inputs.items():
            more.update(v for e in self._before_all if e < k for v in graph.operations[e].outputs)
        operations = list(planned.operations)
        for i, readers in enumerate(self._readers):
            backward = [r for r in readers if graph.operations[r].is_backward]
            for k in self._planned_sources(i) & inputs.keys() if backward else ():
                for r in backward:
                    operations[r] = replace(operations[r], run_once=True)
                    inputs[k].update(v for v in graph.operations[r].outputs if r < k)
        for k, more in inputs.items():
            operations[k] = replace(operations[k], inputs=tuple(sorted({*operations[k].inputs, *more})))
        values = [replace(value, keep=value.keep and v not in released) for v, value in enumerate(planned.values)]
        return replace(planned, operations=tuple(operations), values=tuple(values))

    def _released(self, graph: Graph) -> set[int]:
        """Values that the epilogue reads before the planned operations, in their order, have ended, and not after."""
        order = self.merged(range(self.n_planned))
        end = order.index(self.n_planned - 1)
        late = {v for k in order[end + 1 :] for v in graph.operations[k].inputs}
        early = {v for k in order[: end + 1] if k >= self.n_planned for v in graph.operations[k].inputs}
        return {v for v in early - late if graph.producer[v] < self.n_planned and not graph.values[v].keep}

    def _planned_sources(self, i: int) -> set[int]:
        """Planned operations whose results lead to the i-th operation of the epilogue."""
        n = self.n_planned
        return {k for k in reached(self._sources[i], lambda k: self._sources[k - n] if k >= n else ()) if k < n}


def _shrinks(graph: Graph, k: int) -> bool:
    """Whether an operation's results are smaller than one of the values that it reads."""
    operation = graph.operations[k]
    output_bytes = sum(graph.values[v].bytes for v in operation.outputs)
    return any(graph.values[v].bytes > output_bytes for v in operation.inputs)
