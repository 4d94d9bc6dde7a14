"""Operator logs of Dynamic Tensor Rematerialization's simulator (Kirisame et al., ICLR 2021) as graphs.

A log is what a program did in a training step on a GPU, one JSON object a line, compressed with gzip or not:

- ``ANNOTATE``: the step follows ``START``; the backward pass follows ``BACKWARD``, or without that line begins with the
  first call that has "backward" in its name. The operation before it is the loss.
- ``CONSTANT``, and ``MEMORY`` with its bytes: a parameter, a buffer or an input. All of them are `fixed_bytes`.
- ``CALL``, and ``MEMORY`` and ``ALIAS`` for each result: an operation with its time in nanoseconds. A result owns its
  bytes (``ALIAS`` -1), or shares those of an argument.
- ``COPY``: another name of a tensor; ``COPY_FROM``: a name is given to another tensor.
- ``MUTATE``: a call that writes over arguments.
- ``RELEASE``: the program lets go of a name. What has a name at the end of the log must be there.

How a graph holds it:

- A value is a storage. A call whose results share an argument's storage (a view) is no operation: its readers read the
  storage, and its time is part of the operation that made the storage, as DTR's heuristic counts it, so that it is
  spent again with that. Views of constants are never lost; their time is left out.
- ``MUTATE`` is a copy, as in DTR: an operation that reads the old storage and makes a new one of its size, which takes
  over every name. Its peak is therefore above that of a program that writes in place.
- What a call draws at random is drawn anew if it runs again; DTR allows it. Nothing has to run exactly once.
- Releases are not in the graph. A plan frees after the last use, at the release or before it: the peak of running
  everything once is at most that of the program, which `DtrLog.program_peak_bytes` has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remat.errors import InvalidGraph
from remat.files import read_json_lines
from remat.graph import Graph, Operation, Value

MAX_OPERATIONS = 200_000
SUFFIXES = (".log", ".log.gz")
_NUMBER = re.compile("-?[0-9]{1,19}")
_OWNED = -1  # the ALIAS of a result with a storage of its own


def is_dtr_log(path: str | os.PathLike[str]) -> bool:
    """Whether a file is named as a log: ``.log`` or ``.log.gz``."""
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).endswith(SUFFIXES)


@dataclass(frozen=True, slots=True)
class DtrLog:
    """What is read from a log.

    Attributes:
        graph: the training step, with costs in nanoseconds.
        program_peak_bytes: most bytes that storages with names have at once, and constants, as the program frees them.
    """

    graph: Graph
    program_peak_bytes: int


def load_dtr_log(path: str | os.PathLike[str]) -> DtrLog:
    """Read a log of DTR's simulator.

    Raises:
        InvalidGraph: one line with the file and the line: unreadable, an unknown instruction or name, a wrong number,
            or more than `MAX_OPERATIONS` calls.
    """
    reader = _Reader(Path(path).name)
    for n, line in read_json_lines(path, InvalidGraph):
        try:
            reader.read(line)
        except InvalidGraph as error:
            raise InvalidGraph(f"{os.fspath(path)}: line {n}: {error}") from None
    try:
        return DtrLog(reader.graph(), reader.fixed_bytes + reader.peak_bytes)
    except InvalidGraph as error:
        raise InvalidGraph(f"{os.fspath(path)}: {error}") from None


@dataclass(slots=True, eq=False)
class _Storage:
    """Bytes with names.

    Attributes:
        value: what they hold now, as the id of a value of the graph; None for a constant.
        n_names: how many names it has.
    """

    bytes: int
    value: int | None
    n_names: int = 0


@dataclass(slots=True)
class _Call:
    """A call whose MEMORY and ALIAS lines are being read; `sizes` and `aliases` are those of its results so far."""

    name: str
    cost: int
    arguments: list[_Storage]
    results: list[str]
    sizes: list[int] = field(default_factory=list)
    aliases: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return len(self.aliases) == len(self.results)


class _Reader:
    """Builds a graph from the lines of a log."""

    def __init__(self, file_name: str):
        self.file_name = file_name
        self.storages: dict[str, _Storage] = {}  # of each name
        self.operations: list[dict[str, Any]] = []
        self.values: list[tuple[str, int]] = []  # [V] name, bytes
        self.producers: list[int] = []  # [V]
        self.fixed_bytes = self.held_bytes = self.peak_bytes = 0  # the latter two without constants
        self.backward_from: int | None = None
        self.has_begun = self.skipped = False
        self.constant: str | None = None  # whose MEMORY follows
        self.call: _Call | None = None

    def read(self, line: Any) -> None:
        """Read a line."""
        if not isinstance(line, dict):
            raise InvalidGraph(f"must be an object, not {line!r:.60}")
        instruction = line.get("INSTRUCTION")
        if not self.has_begun:
            self.has_begun = instruction == "ANNOTATE" and line.get("ANNOTATION") == "START"
            self.skipped |= not self.has_begun
            return
        if self.constant is not None and instruction != "MEMORY":
            raise InvalidGraph(f"MEMORY must follow CONSTANT {self.constant!r:.60}")
        if self.call is not None and instruction not in ("MEMORY", "ALIAS"):
            raise InvalidGraph(f"MEMORY and ALIAS of {len(self.call.results)} results must follow CALL")
        read = _INSTRUCTIONS.get(instruction) if isinstance(instruction, str) else None
        if read is None:
            raise InvalidGraph(f"unknown instruction {instruction!r:.60}; known: {', '.join(_INSTRUCTIONS)}")
        read(self, line)

    def graph(self) -> Graph:
        """The graph of all lines."""
        if not self.has_begun:
            raise InvalidGraph("has no line with ANNOTATE START, after which a step begins")
        if self.call is not None or self.constant is not None:
            raise InvalidGraph("ends before the MEMORY and ALIAS of its last call or constant; is it cut short?")
        if not self.operations:
            raise InvalidGraph("has no operations")
        start = self.backward_from
        if start is None:
            start = next((k for k, op in enumerate(self.operations) if "backward" in op["kind"]), len(self.operations))
        operations = tuple(Operation(**op, is_backward=k >= start) for k, op in enumerate(self.operations))
        kept = {storage.value for storage in self.storages.values()}
        values = tuple(Value(name, size, keep=v in kept) for v, (name, size) in enumerate(self.values))
        name = self.file_name.removesuffix(".gz").removesuffix(".log") or "log"
        loss = start - 1 if 0 < start < len(operations) else None
        source = f"{self.file_name}, an operator log of DTR's simulator"
        return Graph(name, operations, values, self.fixed_bytes, "ns", loss, source)

    def annotate(self, line: Mapping[str, Any]) -> None:
        if _text(line, "ANNOTATION") == "BACKWARD" and self.backward_from is None:
            self.backward_from = len(self.operations)

    def declare(self, line: Mapping[str, Any]) -> None:
        self.constant = self._new_name(line, "NAME")

    def memory(self, line: Mapping[str, Any]) -> None:
        name, size = _text(line, "NAME"), _number(line, "MEMORY")
        if self.constant is not None:
            _expect("MEMORY", name, self.constant)
            self._bind(name, _Storage(size, None))
            self.fixed_bytes += size
            self.constant = None
            return
        call = self.call
        if call is None or len(call.sizes) > len(call.aliases):
            raise InvalidGraph(f"MEMORY of {name!r:.60} follows neither CONSTANT nor CALL")
        _expect("MEMORY", name, call.results[len(call.sizes)])
        call.sizes.append(size)

    def alias(self, line: Mapping[str, Any]) -> None:
        name, call = _text(line, "NAME"), self.call
        if call is None or len(call.aliases) >= len(call.sizes):
            raise InvalidGraph(f"ALIAS of {name!r:.60} does not follow its MEMORY")
        _expect("ALIAS", name, call.results[len(call.aliases)])
        alias = _number(line, "ALIAS", least=_OWNED)
        if alias >= len(call.arguments):
            raise InvalidGraph(f"ALIAS of {name!r:.60} is argument {alias}, but there are {len(call.arguments)}")
        call.aliases.append(alias)
        if call.is_whole:
            self._end_call(call)

    def copy(self, line: Mapping[str, Any]) -> None:
        source, target = self._storage(_text(line, "SRC")), self._new_name(line, "DST")
        self._bind(target, source)

    def copy_from(self, line: Mapping[str, Any]) -> None:
        source, target = self._storage(_text(line, "SRC")), _text(line, "DST")
        if self._storage(target) is not source:  # else its bytes would be given up
            self._unbind(target)
            self._bind(target, source)

    def release(self, line: Mapping[str, Any]) -> None:
        name = _text(line, "NAME")
        if name in self.storages or not self.skipped:  # else it may be of a step before START
            self._unbind(name)

    def start_call(self, line: Mapping[str, Any]) -> None:
        name, cost = _text(line, "NAME"), _number(line, "TIME")
        arguments = [self._storage(each) for each in _texts(line, "ARGS")]
        results = _texts(line, "RESULT")
        for i, each in enumerate(results):
            if each in self.storages or each in results[:i]:
                raise InvalidGraph(f"{each!r:.60} is declared a second time")
        self.call = _Call(name, cost, arguments, results)
        if self.call.is_whole:  # without results
            self._end_call(self.call)

    def mutate(self, line: Mapping[str, Any]) -> None:
        name, cost = _text(line, "NAME"), _number(line, "TIME")
        given = _texts(line, "ARGS")
        arguments = [self._storage(each) for each in given]
        places = line.get("MUTATE")
        if not isinstance(places, list) or not all(type(i) is int and 0 <= i < len(given) for i in places):
            raise InvalidGraph(f"'MUTATE' must list places in ARGS, not {places!r:.60}")
        written = {arguments[i]: given[i] for i in places}  # each storage once
        made = self._operation(name, cost, arguments, [(each, storage.bytes) for storage, each in written.items()])
        for storage, value in zip(written, made, strict=True):
            self.held_bytes -= 0 if storage.value is None else storage.bytes  # the old value
            storage.value = value

    def _end_call(self, call: _Call) -> None:
        """Make the operation of a call, or add the time of a view to that of the storage which it shows."""
        self.call = None
        owned = [(name, size) for name, size, alias in zip(call.results, call.sizes, call.aliases, strict=True)
                 if alias == _OWNED]  # fmt: skip
        if owned or not call.results:
            made = iter(self._operation(call.name, call.cost, call.arguments, owned))
        else:
            made = iter(())
            shown = call.arguments[call.aliases[0]].value
            if shown is not None:
                self.operations[self.producers[shown]]["cost"] += call.cost
        for name, size, alias in zip(call.results, call.sizes, call.aliases, strict=True):
            self._bind(name, _Storage(size, next(made)) if alias == _OWNED else call.arguments[alias])

    def _operation(
        self, kind: str, cost: int, arguments: Sequence[_Storage], results: Sequence[tuple[str, int]]
    ) -> range:
        """Add an operation; the ids of the values that it makes, of these names and bytes."""
        k, first = len(self.operations), len(self.values)
        if k == MAX_OPERATIONS:
            raise InvalidGraph(f"has more than {MAX_OPERATIONS:,} calls")
        self.values += results
        self.producers += [k] * len(results)
        made = range(first, len(self.values))
        self.held_bytes += sum(size for _, size in results)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self.operations.append({
            "name": f"{kind}_{k}", "kind": kind, "cost": cost, "outputs": tuple(made),
            "inputs": tuple(sorted({each.value for each in arguments if each.value is not None})),
        })  # fmt: skip
        return made

    def _bind(self, name: str, storage: _Storage) -> None:
        self.storages[name] = storage
        storage.n_names += 1

    def _unbind(self, name: str) -> None:
        storage = self._storage(name)
        storage.n_names -= 1
        del self.storages[name]
        if not storage.n_names and storage.value is not None:
            self.held_bytes -= storage.bytes

    def _storage(self, name: str) -> _Storage:
        if name not in self.storages:
            raise InvalidGraph(f"{name!r:.60} was not declared, or is released")
        return self.storages[name]

    def _new_name(self, line: Mapping[str, Any], key: str) -> str:
        name = _text(line, key)
        if name in self.storages:
            raise InvalidGraph(f"{name!r:.60} is declared a second time")
        return name


_INSTRUCTIONS: Mapping[str, Callable[[_Reader, Mapping[str, Any]], None]] = {
    "ANNOTATE": _Reader.annotate, "CONSTANT": _Reader.declare, "MEMORY": _Reader.memory, "ALIAS": _Reader.alias,
    "CALL": _Reader.start_call, "COPY": _Reader.copy, "COPY_FROM": _Reader.copy_from, "MUTATE": _Reader.mutate,
    "RELEASE": _Reader.release,
}  # fmt: skip


def _text(line: Mapping[str, Any], key: str) -> str:
    text = line.get(key)
    if not isinstance(text, str) or not text:
        raise InvalidGraph(f"'{key}' must be a name, not {text!r:.60}")
    return text


def _texts(line: Mapping[str, Any], key: str) -> list[str]:
    texts = line.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise InvalidGraph(f"'{key}' must be a list of names, not {texts!r:.60}")
    return texts


def _number(line: Mapping[str, Any], key: str, least: int = 0) -> int:
    """A whole number, as JSON's or as text."""
    given = line.get(key)
    text = str(given) if type(given) is int else given
    if not isinstance(text, str) or not _NUMBER.fullmatch(text):
        raise InvalidGraph(f"'{key}' must be a whole number, not {given!r:.60}")
    if int(text) < least:
        raise InvalidGraph(f"'{key}' must be {least} or more, but is {text}")
    return int(text)


def _expect(instruction: str, name: str, expected: str) -> None:
    if name != expected:
        raise InvalidGraph(f"{instruction} of {expected!r:.60} must come here, not of {name!r:.60}")
