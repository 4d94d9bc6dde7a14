"""A network on the device: its captured step, and what its real steps take."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.device.folder import Row
from experiments.steps.torch_runs import built, step_seconds, times_beside
from remat.cost.profile import provenance_of
from remat.errors import InvalidInput
from remat.execution import PlanOptions, StepPlan
from remat.frontends.spec import ModelSpec
from remat.graph import Graph
from remat.plan import Plan
from remat.solution import Solution
from remat.torch.measure import difference_of_steps, peak_of_step
from remat.torch.module import Rematerialized, captured_step
from remat.torch.plain import plain_step
from remat.torch.planner import Planner, default_gpu, describe_inputs, fingerprint_of_step

Find = Callable[[Graph, int, Sequence[Plan]], Solution]


def describe_device(device: str, size: str) -> dict[str, Any]:
    """The device at hand, for ``device.json``.

    Raises:
        InvalidInput: PyTorch finds no CUDA device here.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("PyTorch finds no CUDA device here; capture with --device cpu, or on the device")
    gpu, provenance = results_name(device), provenance_of(device)
    return {
        "device": device, "name": provenance["device"], "gpu": gpu, "size": size,
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "date": date.today().isoformat(), "provenance": provenance,
    }  # fmt: skip


def results_name(device: str) -> str:
    """The name of the folder under ``results/``: that of remat's description of the GPU, if there is one."""
    if device == "cpu":
        return "cpu"
    name, known = torch.cuda.get_device_name(), default_gpu(device).name
    is_known = known.partition("_")[0] in name.lower().replace(" ", "")
    return known if is_known else "_".join(name.lower().split())


class Subject:
    """A network on the device with its captured step.

    Args:
        costs: folder of measurements of operations.
        cost: of operations, see `remat.torch.rematerialize`.
        find: finds plans of compiled steps where no solver is installed.

    Attributes:
        module: returns the loss; in training mode.
        plain: the module as PyTorch runs it, compiled or not.
        fixed_bytes: resident before, during and after every step.
    """

    def __init__(
        self, spec: ModelSpec, backend: str, device: str, costs: Path, cost: str = "profile", find: Find | None = None
    ):
        self.spec, self.backend, self.device, self.cost = spec, backend, device, cost
        self.module, self.args = built(spec, device)
        compiled: Any = torch.compile(self.module, fullgraph=True, dynamic=False) if backend == "inductor" else None
        self.plain: nn.Module = self.module if compiled is None else compiled
        options = PlanOptions(cost=cost, threads=2, gpu=default_gpu(device), cache_folder=costs)
        self.planner = Planner(spec.name, options, device, find=find)
        self._capture()

    def _capture(self) -> None:
        self.inputs = describe_inputs(self.args)
        step = captured_step(self.module, self.args, {}, self.backend, "default")
        self.step = replace(step, graph=replace(step.graph, name=self.spec.graph_name))
        self.graph, self.fixed = self.planner.with_everything_resident(self.step)
        self.fingerprint = fingerprint_of_step(self.step, self.inputs)
        self.fixed_bytes = self.step.graph.fixed_bytes

    def resize(self, batch: int) -> None:
        """Take another batch, and capture its step."""
        before = self.spec.batch_size
        self.args = tuple(_of_batch(x, before, batch) for x in self.args)
        self.spec = replace(self.spec, batch_size=batch)
        self._capture()

    def predicted_plain_bytes(self) -> int:
        """Predicted peak of the plain step."""
        if self.backend == "inductor":
            return self.fixed_bytes + self.planner.compiled(self.step).plain.peak_bytes
        plain = plain_step(self.module, self.args, {})
        works = (op.work for op in self.graph.operations if op.work and not op.work.is_free)
        # Measure also the operations of plans: the process that measures takes seconds to start.
        workspaces = self.planner.workspaces_of([*plain.signatures, *(work.signature for work in works)])
        return self.fixed_bytes + plain.peak_bytes(workspaces)

    def planned(self, plan: StepPlan) -> Rematerialized:
        """The module that follows a plan."""
        planner = replace(self.planner, plans={self.fingerprint.sha256: plan}, budget_bytes=plan.peak_bytes)
        return Rematerialized(self.module, planner, plan, self.backend)

    def measure_memory(self, row: Row, module: nn.Module) -> None:
        """Write the peaks of a step into the row."""
        peak_of_step(module, self.args, {}, self.device)  # compiles, which may take memory that is kept
        self.release()
        row.measured_peak_bytes = self.fixed_bytes + peak_of_step(module, self.args, {}, self.device)
        if self.device == "cuda":
            row.allocated_bytes = torch.cuda.max_memory_allocated()
            row.reserved_bytes = torch.cuda.max_memory_reserved()

    def measure_alone(self, row: Row, module: nn.Module, rounds: int) -> None:
        """Write the time of a step into the row."""
        row.measured_s = statistics.median(step_seconds(module, self.args, self.device) for _ in range(rounds))

    def measure_beside_plain(self, row: Row, module: nn.Module, rounds: int) -> None:
        """Write the times of steps that take turns with the plain step into the row."""
        step_seconds(self.plain, self.args, self.device)  # may compile
        for name, value in times_beside(self.plain, module, self.args, self.device, rounds).items():
            setattr(row, name, value)

    def measure_bits(self, row: Row, module: nn.Module) -> None:
        """Write into the row how much a step differs from the plain eager one."""
        row.difference = difference_of_steps(self.module, module, self.args, {}, self.device)

    def release(self) -> None:
        """Drop gradients, and give cached memory back to the device."""
        self.module.zero_grad()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a step ended because the device's memory was full: the allocator says so, or a library or a compiler."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "alloc_failed" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _of_batch(x: Any, before: int, batch: int) -> Any:
    """A tensor with another number of samples, which are copies; anything else as it is."""
    if not isinstance(x, Tensor) or not x.dim() or x.shape[0] != before:
        return x
    return x[:1].expand(batch, *x.shape[1:]).contiguous()
