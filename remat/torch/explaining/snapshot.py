"""The file of an explanation for PyTorch's memory visualizer: written, never read."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remat.graph import Graph
from remat.plan import Plan
from remat.search.timeline import replayed
from remat.torch.planning.replay import STEP

PROTOCOL = 4  # the visualizer reads no later one
FIRST_ADDRESS = 1 << 32

Frame = dict[str, Any]  # filename, line, name


def snapshot_of(graph: Graph, modules: Sequence[str], there: Mapping[str, int], plans: Sequence[Plan]) -> bytes:
    """What ``torch.cuda.memory._dump_snapshot`` would write after a step of each plan, each as a device.

    Each value has an address of its own, so that the file shows what is held, not how an allocator places it.

    Args:
        modules: [V] what each value belongs to.
        there: [name] bytes throughout the step; they add up to the graph's fixed bytes.
    """
    traces = [_Trace(graph, modules, there, plan) for plan in plans]
    segments = [trace.segment(device) for device, trace in enumerate(traces)]
    return pickle.dumps({"device_traces": [t.events for t in traces], "segments": segments}, protocol=PROTOCOL)


class _Trace:
    """Allocations of a step under a plan. The last address is that of all workspaces, and of what is made again."""

    def __init__(self, graph: Graph, modules: Sequence[str], there: Mapping[str, int], plan: Plan):
        self.graph, self.modules = graph, modules
        most = (op.workspace_bytes + sum(graph.values[v].bytes for v in op.outputs) for op in graph.operations)
        self.sizes = [*there.values(), *(value.bytes for value in graph.values), max(most, default=0)]
        self.addresses = [FIRST_ADDRESS]
        for size in self.sizes[:-1]:
            self.addresses.append(self.addresses[-1] + size)
        self.first = len(there)  # place of value 0
        self.held: dict[int, Frame] = {}
        self.events: list[dict[str, Any]] = []
        for i, name in enumerate(there):
            self._allocate(i, self.sizes[i], {"filename": "before the step", "line": 0, "name": name}, 0)
        self._run(plan)

    def _run(self, plan: Plan) -> None:
        clock, workspaces = 0, len(self.sizes) - 1
        for k, new, others in replayed(self.graph, plan):
            for v in new:
                frame = self._frame(self.graph.producer[v], self.modules[v])
                self._allocate(self.first + v, self.sizes[self.first + v], frame, clock)
            if k < 0:
                for v in others:
                    self._free(self.first + v, self.sizes[self.first + v], clock)
                continue
            op = self.graph.operations[k]
            place = self.modules[op.outputs[0]] if op.outputs else ""
            frame = self._frame(k, place) | {"name": f"workspace of {op.name} ({op.kind})"}
            size = op.workspace_bytes + sum(self.graph.values[v].bytes for v in others)
            self._allocate(workspaces, size, frame, clock)
            clock += op.cost
            self._free(workspaces, size, clock)

    def _frame(self, i: int, module: str) -> Frame:
        op = self.graph.operations[i]
        return {"filename": module or STEP, "line": i, "name": f"{op.name} ({op.kind})"}

    def _allocate(self, at: int, size: int, frame: Frame, clock: int) -> None:
        if size:
            self.held[at] = frame
            self.events.append(self._event("alloc", at, size, clock))

    def _free(self, at: int, size: int, clock: int) -> None:
        if size:
            self.events.extend(self._event(action, at, size, clock) for action in ("free_requested", "free_completed"))
            del self.held[at]

    def _event(self, action: str, at: int, size: int, clock: int) -> dict[str, Any]:
        return {
            "action": action, "addr": self.addresses[at], "size": size, "stream": 0, "time_us": clock // 1000,
            "frames": [self.held[at]],
        }  # fmt: skip

    def segment(self, device: int) -> dict[str, Any]:
        """All addresses, with what is held at the end."""
        blocks, held = [*self._blocks()], sum(self.sizes[at] for at in self.held)
        return {
            "device": device, "address": FIRST_ADDRESS, "total_size": sum(self.sizes), "allocated_size": held,
            "active_size": held, "requested_size": held, "stream": 0, "segment_type": "large", "frames": [],
            "blocks": blocks,
        }  # fmt: skip

    def _blocks(self) -> Iterator[dict[str, Any]]:
        for at, (address, size) in enumerate(zip(self.addresses, self.sizes, strict=True)):
            if size:
                state, frames = ("active_allocated", [self.held[at]]) if at in self.held else ("inactive", [])
                yield {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames}
