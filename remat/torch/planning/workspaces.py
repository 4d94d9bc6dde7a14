"""Workspaces of operations: as measured, and what a repeated draw needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import fx

from remat.graph import Graph, Operation
from remat.plan import Plan
from remat.torch._random import random_state
from remat.torch.step import aot
from remat.torch.step.runners import is_random
from remat.torch.step.training_graph import CapturedStep


def with_workspaces(graph: Graph, step: CapturedStep, measured: Sequence[int], plan: Plan | None = None) -> Graph:
    """The graph with workspaces: the measured ones, or the bytes to read a random generator's state if these are more.

    Args:
        measured: [implementations of all operations] bytes.
        plan: the state is read before the draws that it repeats; by default before every draw that may be repeated.
    """
    times = [2] * len(graph) if plan is None else np.bincount(plan.order, minlength=len(graph))
    sizes, next_measured = list[int](), iter(measured)
    for op, nodes, n in zip(graph.operations, step.nodes, times, strict=True):
        state = _state_bytes(op, nodes) if n > 1 else 0
        for implementation in op.all_implementations:
            output_bytes = sum(graph.values[v].bytes for v in implementation.outputs)
            sizes.append(max(next(next_measured), state - output_bytes))
    return graph.with_workspaces(sizes)


def _state_bytes(op: Operation, nodes: Sequence[fx.Node]) -> int:
    """Bytes that PyTorch's allocator takes to read the random generator's state before a call that may be repeated."""
    replayed = [node for node in nodes if is_random(node) and not op.run_once]
    devices = (device for device in map(aot.device_of, replayed) if device.type == "cpu")
    return max((random_state(device).nbytes for device in devices), default=0)
