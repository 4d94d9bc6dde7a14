"""The graph: operations and the values they produce, with costs and sizes.

Memory belongs to values, cost to operations. A value is a storage; a view of it is not a separate value.
Operations are listed in an executable order (producers before users); `staged` and `fixed_order` plans
compute them for the first time in this order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from remat.errors import InvalidGraph, InvalidInput, plain, shown
from remat.implementation import DEFAULT, Implementation, Work
from remat.units import MAX_BYTES, format_size

T = TypeVar("T", "Operation", "Value", Work)
Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Operation:
    """One unit of computation.

    Attributes:
        name: a label for people, not always unique. Plans refer to operations by id.
        kind: operator or layer type, e.g. ``Conv2D`` or ``aten.relu``.
        inputs: ids of the values read, each once, ascending.
        outputs: ids of the values produced.
        cost: in the graph's `cost_unit`, non-negative.
        workspace_bytes: scratch memory held only while it runs.
        is_backward: whether it belongs to the backward pass.
        run_once: must be computed exactly once (state updates).
        work: input of cost models; None for graphs that come with costs.
        implementations: all except the default one, which the fields above describe.
    """

    name: str
    kind: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    cost: int = 0
    workspace_bytes: int = 0
    is_backward: bool = False
    run_once: bool = False
    work: Work | None = None
    implementations: tuple[Implementation, ...] = ()

    def __post_init__(self) -> None:
        _make_plain(self, "cost", "workspace_bytes", "inputs", "outputs")

    @property
    def all_implementations(self) -> tuple[Implementation, ...]:
        """The default implementation, then `implementations`."""
        own = Implementation(DEFAULT, self.inputs, self.outputs, self.cost, self.workspace_bytes, work=self.work)
        return own, *self.implementations


@dataclass(frozen=True, slots=True)
class Value:
    """A storage produced by one operation.

    Attributes:
        name: for people.
        bytes: size of the storage.
        keep: must be resident when the step ends (e.g. a gradient created in the step).
    """

    name: str
    bytes: int
    keep: bool = False

    def __post_init__(self) -> None:
        _make_plain(self, "bytes")


@dataclass(frozen=True, slots=True, repr=False)
class Graph:
    """Operations in an executable order and the values they exchange; validated on creation.

    Attributes:
        name: of the network, e.g. ``vgg19_b256``.
        operations: N operations, producers before users.
        values: V values; each is an output of exactly one operation. Extra values, which no default implementation
            produces, come last.
        fixed_bytes: resident throughout and never recomputed: parameters, inputs, optimizer state.
        cost_unit: ``ns``, ``flop`` or any other; only ``ns`` is ever shown as seconds.
        loss: index of the operation that computes the loss, or None.
        source: where the graph comes from, one sentence.
        producer: [V] the operation that produces each value (derived).
        users: [V] operations whose default implementation reads each value, ascending (derived).
        n_extra: number of extra values (derived).

    Raises:
        InvalidGraph: names the wrong operation or value.
    """

    name: str
    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    fixed_bytes: int = 0
    cost_unit: str = "ns"
    loss: int | None = None
    source: str = ""
    producer: tuple[int, ...] = field(init=False, repr=False, compare=False)
    users: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    n_extra: int = field(init=False, repr=False, compare=False)
    _sha256: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        _make_plain(self, "fixed_bytes", "loss")
        problems = [*_wrong_kinds(self)] or [*_wrong_texts(self), *_wrong_integers(self)]
        if problems:
            raise InvalidGraph(problems[0], problems)
        n_values = len(self.values)
        producer = [-1] * n_values
        users: list[list[int]] = [[] for _ in range(n_values)]
        extra: set[int] = set()
        for k, op in enumerate(self.operations):
            where = f"operation {k} ({op.name})"
            self._check_inputs(op.inputs, producer, where)
            for v in op.inputs:
                if v in extra:
                    raise InvalidGraph(f"{where} reads the extra value {v} by default; only implementations may")
                users[v].append(k)
            for implementation in op.implementations:
                self._check_inputs(implementation.inputs, producer, f"{where}, implementation '{implementation.name}',")
            for v in op.outputs:
                if not 0 <= v < n_values:
                    raise InvalidGraph(f"{where} produces value {v}, which does not exist")
                if producer[v] >= 0:
                    raise InvalidGraph(f"value {v} ({self.values[v].name}) has two producers")
                producer[v] = k
            extra |= self._check_implementations(k, op, producer)
        if n_values and min(producer) < 0:
            v = producer.index(-1)
            raise InvalidGraph(f"value {v} ({self.values[v].name}) has no producer")
        if extra and min(extra) != n_values - len(extra):
            raise InvalidGraph(f"extra value {min(extra)} ({self.values[min(extra)].name}) must come after all others")
        object.__setattr__(self, "n_extra", len(extra))
        object.__setattr__(self, "producer", tuple(producer))
        object.__setattr__(self, "users", tuple(map(tuple, users)))

    def _check_inputs(self, inputs: Sequence[int], producer: Sequence[int], where: str) -> None:
        for v in inputs:
            if not 0 <= v < len(self.values):
                raise InvalidGraph(f"{where} reads value {v}, which does not exist")
            if producer[v] < 0:
                raise InvalidGraph(
                    f"{where} reads value {v} ({self.values[v].name}) before it is "
                    "produced; operations must be in topological order, without cycles"
                )
        if len(set(inputs)) != len(inputs):
            raise InvalidGraph(f"{where} lists an input twice")

    def _check_implementations(self, k: int, op: Operation, producer: list[int]) -> set[int]:
        """Check the implementations of operation `k`; enter their extra values into `producer` and return them."""
        extra: set[int] = set()
        names = [implementation.name for implementation in op.all_implementations]
        for implementation in op.implementations:
            where = f"operation {k} ({op.name}), implementation '{implementation.name}',"
            if names.count(implementation.name) > 1 or not implementation.name:
                raise InvalidGraph(f"{where} must have a name of its own")
            if len(set(implementation.outputs)) != len(implementation.outputs):
                raise InvalidGraph(f"{where} lists an output twice")
            for v in implementation.outputs:
                if not 0 <= v < len(self.values):
                    raise InvalidGraph(f"{where} produces value {v}, which does not exist")
                if producer[v] not in (-1, k):
                    raise InvalidGraph(f"value {v} ({self.values[v].name}) has two producers")
                if producer[v] < 0:
                    extra.add(v)
                    producer[v] = k
                if self.values[v].keep and v not in op.outputs:
                    raise InvalidGraph(f"{where} produces the extra value {v}, which cannot be kept")
            if implementation.overwrites is not None:
                is_input = implementation.overwrites in implementation.inputs
                same = (
                    is_input and implementation.outputs
                    and self.values[implementation.overwrites].bytes == self.values[implementation.outputs[0]].bytes
                )  # fmt: skip
                if not same:
                    raise InvalidGraph(f"{where} can overwrite only an input, by a first output of the same size")
        return extra

    @classmethod
    def from_nodes(
        cls,
        name: str,
        deps: Sequence[Iterable[int]],
        bytes: Sequence[int],
        costs: Sequence[int],
        *,
        names: Sequence[str] | None = None,
        kinds: Sequence[str] | None = None,
        backward: Sequence[bool] | None = None,
        workspace_bytes: Sequence[int] | None = None,
        works: Sequence[Work | None] | None = None,
        keep: Iterable[int] = (),
        fixed_bytes: int = 0,
        cost_unit: str = "ns",
        loss: int | None = None,
        source: str = "",
    ) -> Graph:
        """A graph with one value per operation: value i is the output of operation i.

        Args:
            deps: [N] the nodes that each node reads.
            bytes: [N] size of each node's output.
            costs: [N] cost of each node in `cost_unit`.
        """
        given = [_listed(dep, f"entry {i} of deps") for i, dep in enumerate(_listed(deps, "deps"))]
        n = len(given)
        kept = _listed(keep, "keep")
        absent = [v for v in kept if not _is_id(v) or not 0 <= v < n]
        if absent:
            raise InvalidGraph(f"keep names value {shown(absent[0])}, but there are {n} nodes")

        def column(what: str, entries: Any, default: Any) -> list[Any]:
            entries = [default] * n if entries is None else _listed(entries, what)
            if len(entries) != n:
                raise InvalidGraph(f"{what} has {len(entries)} entries, but deps has {n}: each needs one for each node")
            return entries

        labels = [str(i) for i in range(n)] if names is None else column("names", names, "")
        of_operations = zip(
            labels, column("kinds", kinds, ""), given, column("costs", costs, ()),
            column("workspace_bytes", workspace_bytes, 0), column("backward", backward, False),
            column("works", works, None), strict=True,
        )  # fmt: skip
        operations = tuple(
            Operation(name, kind, _ascending(dep), (i,), cost, workspace, bool(is_backward), work=work)
            for i, (name, kind, dep, cost, workspace, is_backward, work) in enumerate(of_operations)
        )
        sizes = column("bytes", bytes, ())
        kept = set(kept)
        values = tuple(Value(label, size, i in kept) for i, (label, size) in enumerate(zip(labels, sizes, strict=True)))
        return cls(name, operations, values, fixed_bytes, cost_unit, loss, source)

    def __repr__(self) -> str:
        return (
            f"<Graph '{self.name}': {len(self)} operations, {len(self.values)} values, {format_size(self.fixed_bytes)} "
            f"fixed, costs in {self.cost_unit or 'no unit'}>"
        )

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def n_edges(self) -> int:
        """Number of (value, user) pairs."""
        return sum(len(op.inputs) for op in self.operations)

    @property
    def costs(self) -> np.ndarray:
        """[N] int64, cost of each operation."""
        return np.array([op.cost for op in self.operations], dtype=np.int64)

    @property
    def value_bytes(self) -> np.ndarray:
        """[V] int64, size of each value."""
        return np.array([value.bytes for value in self.values], dtype=np.int64)

    @property
    def total_cost(self) -> int:
        """Cost of running every operation once: the denominator of overhead, and a lower bound."""
        return sum(op.cost for op in self.operations)

    @property
    def has_implementations(self) -> bool:
        """Whether some operation has several implementations."""
        return any(op.implementations for op in self.operations)

    @property
    def least_cost(self) -> int:
        """Cost of running every operation once with its cheapest implementation: no plan costs less."""
        return sum(min((op.cost, *(each.cost for each in op.implementations))) for op in self.operations)

    def default(self) -> Graph:
        """The graph with default implementations only; its ids are the same."""
        if not self.has_implementations:
            return self
        operations = tuple(replace(op, implementations=()) for op in self.operations)
        return replace(self, operations=operations, values=self.values[: len(self.values) - self.n_extra])

    def implementation(self, k: int, name: str) -> Implementation:
        """The implementation of operation `k` of that name; raises `KeyError`."""
        if name in ("", DEFAULT):
            return self.operations[k].all_implementations[0]
        for implementation in self.operations[k].implementations:
            if implementation.name == name:
                return implementation
        raise KeyError(name)

    @property
    def is_single_output(self) -> bool:
        """Whether value i is the only output of operation i, for every i (the form of remat-graph/1)."""
        return len(self.values) == len(self.operations) and all(
            op.outputs == (i,) for i, op in enumerate(self.operations)
        )

    def working_set_bytes(self, k: int) -> int:
        """Bytes that operation `k` needs at once with its smallest implementation, fixed bytes included."""
        return self.fixed_bytes + min(map(self.touched_bytes, self.operations[k].all_implementations))

    def touched_bytes(self, implementation: Implementation) -> int:
        """Bytes of inputs, outputs and workspace while `implementation` runs."""
        touched = sum(self.values[v].bytes for v in (*implementation.inputs, *implementation.outputs))
        shared = 0 if implementation.overwrites is None else self.values[implementation.overwrites].bytes
        return touched - shared + implementation.workspace_bytes

    @property
    def final_bytes(self) -> int:
        """Bytes resident when any plan ends: fixed bytes and values with `keep`."""
        return self.fixed_bytes + sum(value.bytes for value in self.values if value.keep)

    def largest_working_set(self) -> tuple[int, int]:
        """(bytes, operation) of the largest working set: a lower bound on the peak of every plan."""
        if not self.operations:
            return self.fixed_bytes, -1
        k = max(range(len(self)), key=self.working_set_bytes)
        return self.working_set_bytes(k), k

    def predecessors(self, k: int) -> tuple[int, ...]:
        """Operations whose outputs operation `k` reads, ascending."""
        return tuple(sorted({self.producer[v] for v in self.operations[k].inputs}))

    def with_costs(self, costs: Sequence[int], cost_unit: str) -> Graph:
        """The same graph with other costs, e.g. of a cost model: one for each operation of `every_implementation`."""
        return self._with_each("cost", costs, cost_unit)

    def with_workspaces(self, sizes: Sequence[int]) -> Graph:
        """The same graph with other workspaces, in bytes: one for each operation of `every_implementation`."""
        return self._with_each("workspace_bytes", sizes, self.cost_unit)

    def _with_each(self, field: str, numbers: Sequence[int], cost_unit: str) -> Graph:
        n = sum(len(op.all_implementations) for op in self.operations)
        try:
            numbers = [int(number) for number in numbers]
        except (TypeError, ValueError, OverflowError):
            raise InvalidGraph(f"{field} must be a list of numbers, not {shown(numbers)}") from None
        if len(numbers) != n:
            raise InvalidGraph(f"{len(numbers)} numbers of {field} given for {n} operations")
        each = iter(numbers)

        def changed(op: Operation) -> Operation:
            own = with_numbers(op, **{field: next(each)})
            if not op.implementations:
                return own
            others = tuple(replace(implementation, **{field: next(each)}) for implementation in op.implementations)
            return replace(own, implementations=others)

        return self.resized(tuple(map(changed, self.operations)), cost_unit=cost_unit)

    def resized(
        self, operations: Sequence[Operation] | None = None, values: Sequence[Value] | None = None,
        fixed_bytes: int | None = None, cost_unit: str | None = None,
    ) -> Graph:  # fmt: skip
        """The same graph with other bytes, costs and work; only these numbers are checked.

        Args:
            operations, values: differ from this graph's in numbers alone; None: they are the same.

        Raises:
            InvalidGraph: a number is negative or too large.
        """
        changed = {
            "operations": None if operations is None else tuple(operations),
            "values": None if values is None else tuple(values), "fixed_bytes": fixed_bytes, "cost_unit": cost_unit,
        }  # fmt: skip
        changed = {name: given for name, given in changed.items() if given is not None}
        if values is not None and self.has_implementations:  # what overwrites an input must have its size
            return replace(self, **changed)
        made = copy(self)
        for name, given in (*changed.items(), ("_sha256", "")):
            object.__setattr__(made, name, given)
        problems = _wrong_integers(made)
        if problems:
            raise InvalidGraph(problems[0], problems)
        return made

    def every_implementation(self) -> Graph:
        """The input of a cost model: each implementation of each operation as an operation, in order, no values."""
        if not self.has_implementations:
            return self
        implementations = [
            replace(op, inputs=(), outputs=(), work=each.work, implementations=(), workspace_bytes=each.workspace_bytes)
            for op in self.operations
            for each in op.all_implementations
        ]
        return Graph(self.name, tuple(implementations), (), 0, self.cost_unit)

    def sha256(self) -> str:
        """Hash of everything that decides a plan's validity, cost and memory (names and work excluded)."""
        if not self._sha256:
            object.__setattr__(self, "_sha256", self._hash())  # cached, because every plan and replay asks for it
        return self._sha256

    def _hash(self) -> str:
        content = [
            self.fixed_bytes,
            self.cost_unit,
            [[o.inputs, o.outputs, o.cost, o.workspace_bytes, o.is_backward, o.run_once] for o in self.operations],
            [[v.bytes, v.keep] for v in self.values],
        ]
        if self.has_implementations:
            content.append([
                [[w.name, w.inputs, w.outputs, w.cost, w.workspace_bytes, w.overwrites, w.is_lossy]
                 for w in op.implementations]
                for op in self.operations
            ])  # fmt: skip
        return hashlib.sha256(json.dumps(content, separators=(",", ":"), default=int).encode()).hexdigest()


def with_numbers(owner: T, **changed: Any) -> T:
    """As `dataclasses.replace`, in a fifth of the time; for `Graph.resized`, which checks the numbers."""
    made = object.__new__(type(owner))
    for name in type(owner).__slots__:  # pyright: ignore[reportAttributeAccessIssue]
        object.__setattr__(made, name, changed[name] if name in changed else getattr(owner, name))
    return made


def _make_plain(owner: object, *names: str) -> None:
    """Make Python integers of NumPy's, alone or in tuples: NumPy's overflow, and sums must be exact."""
    for name in names:
        given = getattr(owner, name)
        if type(given) is int:
            continue
        if isinstance(given, np.integer):
            object.__setattr__(owner, name, int(given))
        elif isinstance(given, tuple) and not {*map(type, given)} <= {int}:
            object.__setattr__(owner, name, tuple(int(x) if isinstance(x, np.integer) else x for x in given))


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise InvalidGraph(f"{what} must be a list, not {shown(given)}") from None


def _ascending(ids: Sequence[Any]) -> tuple[Any, ...]:
    """The ids once each, ascending; what is no id is left for `_wrong_kinds`."""
    return tuple(sorted(set(ids))) if all(map(_is_id, ids)) else tuple(ids)


def _is_id(given: object) -> bool:
    return isinstance(given, (int, np.integer)) and not isinstance(given, bool)


def _wrong_kinds(graph: Graph) -> Iterator[str]:
    """A line for each operation and value that is none, and for each field of them that holds another kind."""
    for name in ("name", "cost_unit", "source"):
        if not isinstance(getattr(graph, name), str):
            yield f"the graph's {name} must be text, not {shown(getattr(graph, name))}"
    for what, kind in (("operations", Operation), ("values", Value)):
        given = getattr(graph, what)
        wrong = [each for each in given if not isinstance(each, kind)] if isinstance(given, (tuple, list)) else [given]
        if wrong:
            yield f"{what} must be a tuple of remat.{kind.__name__}, not of {shown(wrong[0])}"
            return
    for k, op in enumerate(graph.operations):
        where = f"operation {k} ({plain(op.name)})"
        if not isinstance(op.implementations, (tuple, list)) or not all(
            isinstance(each, Implementation) for each in op.implementations
        ):
            yield f"{where}: implementations must be a tuple of implementations, not {shown(op.implementations)}"
            continue
        for name in ("name", "kind"):
            if not isinstance(getattr(op, name), str):
                yield f"{where}: {name} must be text, not {shown(getattr(op, name))}"
        if op.work is not None and not isinstance(op.work, Work):
            yield f"{where}: work must be a remat.Work or None, not {shown(op.work)}"
        for name in ("is_backward", "run_once"):
            if not isinstance(getattr(op, name), (bool, np.bool_)):
                yield f"{where}: {name} must be True or False, not {shown(getattr(op, name))}"
        for each in (op, *op.implementations):
            for name in ("inputs", "outputs"):
                ids = getattr(each, name)
                if not isinstance(ids, (tuple, list)) or not (set(map(type, ids)) <= {int} or all(map(_is_id, ids))):
                    yield f"{where}: {name} must be a tuple of value indices, not {shown(ids)}"
    for v, value in enumerate(graph.values):
        if not isinstance(value.keep, (bool, np.bool_)):
            yield f"value {v} ({plain(value.name)}): keep must be True or False, not {shown(value.keep)}"
        if not isinstance(value.name, str):
            yield f"value {v}: its name must be text, not {shown(value.name)}"


# Characters that end lines, move the cursor, or reverse the direction of text: no name needs them.
_CONTROL = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069]")
_SURROGATE = re.compile("[\\ud800-\\udfff]")


def text_problem(text: str) -> str:
    """Why `text` cannot safely be shown in a line, or written as UTF-8; '' if it can."""
    if text.isprintable():
        return ""
    if _CONTROL.search(text):
        return f"holds a control character: {text!r:.80}"
    return f"holds half a character (a lone surrogate): {text!r:.80}" if _SURROGATE.search(text) else ""


def _wrong_texts(graph: Graph) -> Iterator[str]:
    """A line for each text that cannot be shown in a line."""

    def wrong(text: str, what: str) -> Iterator[str]:
        problem = text_problem(text)
        if problem:
            yield f"{what} {problem}"

    for what in ("name", "cost_unit", "source"):
        yield from wrong(getattr(graph, what), f"the graph's {what}")
    for k, op in enumerate(graph.operations):
        yield from wrong(op.name, f"the name of operation {k}")
        yield from wrong(op.kind, f"the kind of operation {k}")
        for implementation in op.implementations:
            yield from wrong(implementation.name, f"the name of an implementation of operation {k}")
    for i, value in enumerate(graph.values):
        if i >= len(graph.operations) or value.name != graph.operations[i].name:  # the same name is reported once
            yield from wrong(value.name, f"the name of value {i}")


def _wrong_integers(graph: Graph) -> list[str]:
    """A line for each number that is no integer or out of range."""

    found: list[str] = []

    def look(number: object, what: str) -> None:
        if isinstance(number, bool) or not isinstance(number, int):
            found.append(f"{what} must be an integer, not {shown(number)}")
        elif number < 0:
            found.append(f"{what} must not be negative, but is {shown(number)}")
        elif number > MAX_BYTES:
            found.append(f"{what} is {shown(number)}, beyond the limit of {MAX_BYTES}")

    numbers = [graph.fixed_bytes, *(value.bytes for value in graph.values)]
    numbers += [number for op in graph.operations for number in (op.cost, op.workspace_bytes)]
    is_plain = not graph.has_implementations and {*map(type, numbers)} == {int}
    if not is_plain or not 0 <= min(numbers) <= max(numbers) <= MAX_BYTES:
        _look_at_each(graph, look)
    if found:
        return found
    most_cost = sum(max((op.cost, *(each.cost for each in op.implementations))) for op in graph.operations)
    if sum(v.bytes for v in graph.values) > MAX_BYTES or most_cost > MAX_BYTES:
        found.append(f"the graph's total bytes or cost exceed {MAX_BYTES}")
    if graph.loss is not None and not _is_id(graph.loss):
        found.append(f"loss must be an operation's index or None, not {shown(graph.loss)}")
    elif graph.loss is not None and not 0 <= graph.loss < len(graph.operations):
        found.append(f"loss is {shown(graph.loss)}, but there are {len(graph.operations)} operations")
    return found


def _look_at_each(graph: Graph, look: Callable[[object, str], None]) -> None:
    """Call `look` with each number that must be an integer, and what it is."""
    look(graph.fixed_bytes, "fixed_bytes")
    for k, op in enumerate(graph.operations):
        look(op.cost, f"cost of operation {k} ({op.name})")
        look(op.workspace_bytes, f"workspace_bytes of operation {k} ({op.name})")
        for implementation in op.implementations:
            where = f"implementation '{implementation.name}' of operation {k} ({op.name})"
            look(implementation.cost, f"cost of {where}")
            look(implementation.workspace_bytes, f"workspace_bytes of {where}")
    for i, value in enumerate(graph.values):
        look(value.bytes, f"bytes of value {i} ({value.name})")


def reached(starts: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> dict[Node, None]:
    """The starts, and all that is reached from them, each once."""
    found, todo = dict[Node, None](), [*starts]
    while todo:
        if (node := todo.pop()) not in found:
            found[node] = None
            todo += following(node)
    return found


def is_held_outside(graph: Graph, v: int) -> bool:
    """Whether freeing a value gives nothing back while values are copied: it is made once and kept, so that somebody
    outside holds it, e.g. the caller who got an output."""
    return graph.values[v].keep and graph.operations[graph.producer[v]].run_once


def check_graph(graph: object) -> None:
    """Raise `InvalidInput` if `graph` is no `Graph`."""
    if not isinstance(graph, Graph):
        raise InvalidInput(f"graph must be a remat.Graph, not {type(graph).__name__}; see remat.load_graph")
