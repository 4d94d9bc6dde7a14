"""What is known of a step on other shapes, from the plan of one: costs and workspaces within a moment.

Both steps make the same calls on tensors of other sizes. A cost changes as its roofline time does. A workspace is
measured in this process, as long as there is time; then it is taken to grow with the bytes of the call's tensors, and
never to shrink.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from remat.cost.gpu import Gpu
from remat.cost.profile import profile_workspaces
from remat.cost.roofline import operation_ns
from remat.graph import Graph, Operation
from remat.torch.internals.autograd import profiler_is_on
from remat.torch.measuring import timing

MEASURE_S = 0.15  # in which workspaces are measured


def scaled_costs(known: Graph, graph: Graph, gpu: Gpu) -> list[int]:
    """Cost of every implementation of every operation of `graph`, whose calls are those of `known`.

    Args:
        gpu: whose roofline times say how costs change.
    """
    pairs = zip(known.every_implementation().operations, graph.every_implementation().operations, strict=True)
    return [max(1, round(old.cost * _ratio(old, new, gpu))) if old.cost else 0 for old, new in pairs]


def _ratio(old: Operation, new: Operation, gpu: Gpu) -> float:
    """Roofline time of a call over that of the same call on other sizes; 1 without a description of its work."""
    if old.work is None or new.work is None:
        return 1.0
    before = operation_ns(old.kind, old.work, gpu, old.is_backward)
    return operation_ns(new.kind, new.work, gpu, new.is_backward) / before if before else 1.0


def workspaces(known: Graph, graph: Graph, cache_folder: Path, device: str) -> list[int]:
    """Workspaces in bytes of every implementation of every operation of `graph`, measured, or from those of `known`."""
    pairs = [*zip(known.every_implementation().operations, graph.every_implementation().operations, strict=True)]
    # Those that are expected to need one come first, because the time may end before the others.
    order = sorted(range(len(pairs)), key=lambda k: -_expected(*pairs[k]))
    operations = [replace(pairs[k][1], inputs=(), outputs=(), workspace_bytes=_expected(*pairs[k])) for k in order]
    ends = time.monotonic() + MEASURE_S

    def measure(signature: str) -> int | None:
        with timing.profiler_alone(waits=False) as is_alone:
            may_measure = is_alone and time.monotonic() <= ends and not profiler_is_on()
            return measured_here(signature, device) if may_measure else None

    sizes, _ = profile_workspaces(Graph(graph.name, tuple(operations), ()), cache_folder, device, measure)
    found = dict(zip(order, sizes, strict=True))
    return [found[k] for k in range(len(pairs))]


def measured_here(signature: str, device: str) -> int:
    """The workspace of a call in bytes, measured in this process; random numbers go on as before."""
    with torch.random.fork_rng([torch.cuda.current_device()] if device == "cuda" else []):
        return timing.workspace(json.loads(signature), device)


def _expected(old: Operation, new: Operation) -> int:
    """The workspace if it grows with the bytes that the call moves."""
    moved = [0 if op.work is None else op.work.bytes_moved for op in (old, new)]
    return math.ceil(old.workspace_bytes * (max(1.0, moved[1] / moved[0]) if moved[0] else 1.0))
