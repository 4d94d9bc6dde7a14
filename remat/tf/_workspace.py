"""Workspaces of kernels, and the results that kernels write over an input: measured once each.

Both depend on kernel, shape and machine; no graph has them. Each distinct operation runs alone in a child process
whose heap is counted. Files cache the results, as `remat.cost.profile` caches times.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from remat.cost import CostWarning
from remat.cost.profile import machine
from remat.cost.records import cache_key, is_measurement, read_record
from remat.errors import RematError, warn
from remat.execution import default_cache
from remat.graph import Graph
from remat.simulator import Sharing
from remat.tf._heap import run_child, why_it_failed
from remat.tf.capture import CapturedStep


@dataclass(frozen=True, slots=True)
class Footprint:
    """The whole step and its planned part with measured workspaces, and the values that may share storage.

    `scratch` has for each operation {input value: bytes of the workspace that lie in its storage if it dies there}.
    """

    graph: Graph
    planned: Graph
    sharing: Sharing
    scratch: tuple[dict[int, int], ...] = ()

    def with_scratch_shared(self, graph: Graph, order: Sequence[int]) -> Graph:
        """`graph` with smaller workspaces where an operation's scratch always lies in a dying input."""
        if not any(self.scratch):
            return graph
        operations = graph.operations
        spared: dict[int, list[int]] = {}
        needed_later: set[int] = {v for v, value in enumerate(graph.values) if value.keep}
        for k in reversed(order):  # a value dies where it is not read again before it is computed again
            if self.scratch[k]:
                dying = [size for v, size in self.scratch[k].items() if v not in needed_later]
                spared.setdefault(k, []).append(sum(dying))
            needed_later.difference_update(operations[k].outputs)
            needed_later.update(operations[k].inputs)
        changed = list(operations)
        for k, sizes in spared.items():
            changed[k] = replace(operations[k], workspace_bytes=operations[k].workspace_bytes - min(sizes))
        return replace(graph, operations=tuple(changed))


def measure_footprint(step: CapturedStep) -> Footprint:
    """Workspaces in bytes and shared storages of every operation of `step`.

    Operations that cannot run alone (loops, variables, lists) keep their workspace of the graph.

    Raises:
        MissingPackage: no C compiler.
        RematError: the measuring process failed.
    """
    signatures = [op.work.signature if op.work and not op.work.is_free else "" for op in step.graph.operations]
    wanted = dict.fromkeys(s for s in signatures if s)
    label, versions = machine(["tensorflow"])
    provenance = {
        "device": label, "versions": versions, "measures": "memory/2",
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS", ""),  # chooses other kernels
    }  # fmt: skip
    keys = {s: cache_key(s, provenance) for s in wanted}
    folder = default_cache() / "tensorflow"
    records = {s: record for s in wanted if (record := _read(folder / f"{keys[s]}.json")) is not None}
    representatives = _representatives(wanted)
    missing = {s for s in wanted if s not in records}
    missing |= {s for s in representatives.values() if "scratch" not in records.get(s, {})}
    if missing:
        failures = _measure({keys[s]: s for s in wanted if s in missing},
                            [keys[s] for s in representatives.values()], folder, provenance)  # fmt: skip
        records |= {s: r for s in missing if (r := _read(folder / f"{keys[s]}.json")) is not None}
        if failures:
            named = ", ".join(
                sorted(f"{json.loads(s)['op']} ({failures[k]})" for s, k in keys.items() if k in failures)
            )
            warn(f"workspace not measured, taken as 0: {named}", CostWarning)
    workspaces = [
        records[s]["workspace_bytes"] if s in records else op.workspace_bytes
        for s, op in zip(signatures, step.graph.operations, strict=True)
    ]
    sharing, scratch = [], []
    for k, s in enumerate(signatures):
        record = records.get(representatives[_pattern(s)], {}) if s else {}
        sharing.append(_pairs(step, k, record.get("shares", []) or _loop_pairs(step, k)))
        scratch.append(_scratch(step, k, record.get("scratch", []), workspaces[k]))
    return Footprint(
        step.graph.with_workspaces(workspaces), step.planned.with_workspaces(workspaces[: len(step.planned)]),
        tuple(sharing), tuple(scratch),
    )  # fmt: skip


def _values_read_once(step: CapturedStep, k: int) -> list[int | None]:
    """[input] the value that operation `k` reads there; None if the input is no value, or if `k` reads it twice.

    TensorFlow never reuses the storage of a value that an operation reads twice.
    """
    values = [step.value_of.get(step.reader.base(t).name) for t in step.nodes[k].inputs]
    return [v if values.count(v) == 1 else None for v in values]


def _pairs(step: CapturedStep, k: int, shares: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """(input, output) values of operation `k` that may share storage, from their positions."""
    sources, outputs, values = _values_read_once(step, k), step.graph.operations[k].outputs, step.graph.values
    pairs = [(sources[i], outputs[o]) for i, o in shares]
    return tuple((s, target) for s, target in pairs if s is not None and values[s].bytes >= values[target].bytes)


def _scratch(step: CapturedStep, k: int, positions: Sequence[int], workspace: int) -> dict[int, int]:
    """{value: bytes} of the inputs at `positions`, whose storage the kernel takes for scratch if they die there."""
    sources = _values_read_once(step, k)
    found: dict[int, int] = {}
    for i in positions:
        source = sources[i]
        if source is not None:
            size = step.graph.values[source].bytes
            if sum(found.values()) + size <= workspace:
                found[source] = size
    return found


def _loop_pairs(step: CapturedStep, k: int) -> list[list[int]]:
    """(input, output) positions of a loop: its own variables, and lists that it empties with those that it fills.

    The first value of a loop variable dies in the first turn. A list that the loop empties, turn by turn, dies while
    another is filled. Several inputs may match one output; the simulator takes one that dies.
    """
    loop = step.reader.loops.get(step.nodes[k].name)
    if loop is None:
        return []
    outputs = step.nodes[k].outputs
    own = [i for i in range(len(outputs)) if loop.alias_of[i] is None and loop.output_bytes[i] > 0]
    emptied = [
        i for i, t in enumerate(outputs)
        if t.dtype.name == "variant" and loop.alias_of[i] is None and loop.output_bytes[i] == 0
    ]  # fmt: skip
    filled = [i for i in own if outputs[i].dtype.name == "variant"]
    return [[i, i] for i in own] + [[i, o] for o in filled for i in emptied]


def _pattern(signature: str) -> str:
    """The facts that decide whether a kernel reuses an input: its kind, and how the operands' sizes compare."""
    description = json.loads(signature)
    largest = max((_size(entry) for entry in description["inputs"]), default=0)
    operands = [
        ["c"] if "c" in entry else [entry["d"], _size(entry) == largest and largest > 0]
        for entry in description["inputs"]
    ]
    return json.dumps([description["op"], operands])


def _size(entry: Mapping[str, Any]) -> int:
    return math.prod(entry.get("t", [0]))


def _representatives(signatures: Mapping[str, None]) -> dict[str, str]:
    """Pattern -> its signature with the most elements."""
    by_size = sorted(signatures, key=lambda s: (sum(map(_size, json.loads(s)["inputs"])), s))
    return {_pattern(s): s for s in by_size}


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a cache file; None if it must be measured again."""
    record = read_record(path)
    return record if is_measurement(record.get("workspace_bytes")) else None


def _measure(
    missing: Mapping[str, str], sharing: list[str], folder: Path, provenance: Mapping[str, Any]
) -> dict[str, str]:
    """Measure in child processes; a crash loses the operation that was running. Returns {key: failure}."""
    rest, failures = dict(missing), {}
    while rest:
        job = {"kind": "operations", "signatures": rest, "sharing": sharing, "folder": str(folder.resolve()),
               "provenance": dict(provenance)}  # fmt: skip
        done = run_child(job)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        failures |= {line["failed"]: line["reason"] for line in lines if "failed" in line}
        if done.returncode == 0:
            return failures
        started = [line["start"] for line in lines if "start" in line]
        if not started:
            raise RematError(f"measuring kernels failed: {why_it_failed(done)}")
        failures[started[-1]] = f"its process failed, {why_it_failed(done)}"
        rest = {key: s for key, s in rest.items() if key not in started}
    return failures
