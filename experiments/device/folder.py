"""The folder that the three commands hand on, and its files.

``device.json`` describes the device; ``costs/`` has the measurements of operations. Each case, a network with a
backend, has a folder of its own: ``capture.json``, the graphs, a plan for each budget, and ``rows.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.device.models import BACKENDS, MODELS
from remat.errors import InvalidInput
from remat.files import read_json, read_lines, write_lines, write_text

FORMAT = "remat-device/1"
CAPTURE, PLAIN, PLANNED = "capture", "plain", "plan"  # methods of rows
LARGEST, LARGEST_PLANNED = "largest plain batch", "largest planned batch"
EXECUTE, BATCHES = "execute", "largest batches"  # what there is to do on the device once there are plans
OUT_OF_MEMORY = "out of memory"  # an outcome
SMALLEST = "smallest"  # in place of a share of the plain peak: the plan that is known to need the least memory


@dataclass(slots=True)
class Row:
    """One measurement on the device; None for a value that was not measured.

    Bytes are of everything that PyTorch's allocator holds. Times are of one step without the optimizer.

    Attributes:
        share: budget as a share of the plain peak, or `SMALLEST`; '' for a plain step.
        measured_peak_bytes: resident tensors and what a step adds to them at its peak; comparable to the prediction.
        allocated_bytes, reserved_bytes: the allocator's own peaks, on CUDA: with what libraries hold beside a step.
        plain_s, measured_s, measured_ratio, ratio_quartiles: medians of steps that took turns with the plain step.
        difference: of outputs, gradients and buffers from the plain eager step, relative to a tensor's largest number;
            0 for the same bits. Of the plain eager step: from itself.
        failed_batch: the smallest batch that was tried and does not train within the memory.
        outcome: why there is no measurement although everything went well, e.g. ``out of memory``.
        error: what stopped the measurement; such a row is measured again by the next run.
        run: which call of the command measured it.
    """

    method: str
    share: str = ""
    batch: int | None = None
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    measured_peak_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_overhead: float | None = None
    recomputed: int | None = None
    plain_s: float | None = None
    measured_s: float | None = None
    measured_ratio: float | None = None
    ratio_quartiles: list[float] = field(default_factory=list)
    difference: float | None = None
    failed_batch: int | None = None
    outcome: str = ""
    error: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """A network with a backend, and its files."""

    model: str
    backend: str
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.model} {self.backend}"

    @property
    def capture_file(self) -> Path:
        return self.folder / "capture.json"

    def captured(self) -> dict[str, Any] | None:
        """What `experiments.device.capture` found; None if the case is not captured, or the capture failed."""
        return _read(self.capture_file) if self.capture_file.exists() else None

    def graph_file(self, name: str) -> Path:
        """``graph``, or ``cautious`` (see `remat.torch.compiled.Weighed`)."""
        return self.folder / f"{name}.json.gz"

    def plan_file(self, share: str) -> Path:
        """The plan of a budget; for a compiled step, a list of orders of groups."""
        return self.folder / "plans" / f"{share}.json"

    def outcome_file(self, share: str) -> Path:
        """How the search for plans within a budget ended; there once it did."""
        return self.folder / "plans" / f"{share}.outcome.json"

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """[share] what is in its `outcome_file`; the largest budget first."""
        files = (self.folder / "plans").glob("*.outcome.json")
        found = {path.name.removesuffix(".outcome.json"): _read(path) for path in files}
        return dict(sorted(found.items(), key=lambda each: -each[1]["budget_bytes"]))

    def rows(self) -> list[Row]:
        return [Row(**row) for row in read_lines(self.folder / "rows.jsonl")]

    def add(self, row: Row) -> None:
        """Add a row in place of an earlier one of the same method and share."""
        others = [other for other in self.rows() if (other.method, other.share) != (row.method, row.share)]
        write_lines(self.folder / "rows.jsonl", map(asdict, [*others, row]))

    def drop(self, method: str) -> None:
        """Remove the rows of a method, if there are any."""
        rows = self.rows()
        if any(row.method == method for row in rows):
            write_lines(self.folder / "rows.jsonl", [asdict(row) for row in rows if row.method != method])

    def planned_shares(self) -> list[str]:
        """Budgets for which there are plans; the one in the middle first, because it is worth the most."""
        shares = [share for share, outcome in self.outcomes().items() if "failed" not in outcome]
        return sorted(shares, key=lambda share: 1.0 if share == SMALLEST else abs(float(share) - 0.6))

    def missing(self, work: str, run: str) -> list[tuple[str, str]]:
        """(method, share) of the rows to measure, without those that this run has tried; the first are worth the most.

        Args:
            work: `EXECUTE` or `BATCHES`.
        """
        shares = self.planned_shares()
        if work == EXECUTE:
            rows = [(PLAIN, ""), *((PLANNED, share) for share in shares)]
        else:
            rows = [(LARGEST, ""), *([(LARGEST_PLANNED, "")] if shares else [])]
        done = {(row.method, row.share) for row in self.rows() if not row.error or row.run == run}
        return [row for row in rows if row not in done]


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder that is handed on."""

    path: Path

    @property
    def costs(self) -> Path:
        """Measurements of operations."""
        return self.path / "costs"

    def case(self, model: str, backend: str) -> Case:
        return Case(model, backend, self.path / f"{model}_{backend}")

    def device(self) -> dict[str, Any]:
        """The device on which the steps were captured.

        Raises:
            InvalidInput: nothing was captured into this folder.
        """
        if not (self.path / "device.json").is_file():
            raise InvalidInput(
                f"{self.path} holds no captures: run python -m experiments.device capture {self.path} on the device"
            )
        return _read(self.path / "device.json")

    def describe(self, device: Mapping[str, Any]) -> None:
        """Write the device.

        Raises:
            InvalidInput: the folder has captures of another device or version.
        """
        if (self.path / "device.json").is_file():
            self.check(device)
        else:
            write_document(self.path / "device.json", device)

    def check(self, device: Mapping[str, Any]) -> None:
        """Refuse to go on with captures of another device, version or size.

        Raises:
            InvalidInput: naming the first difference.
        """
        known = self.device()
        for key, what in (("torch", "PyTorch"), ("name", "the device"), ("size", "--size")):
            if known[key] != device[key]:
                raise InvalidInput(
                    f"{self.path} was captured with {what} {known[key]}, here it is {device[key]}: "
                    "go on there, or capture into another folder"
                )

    def captured(self, models: list[str], backends: list[str]) -> list[Case]:
        """The captured cases among these.

        Raises:
            InvalidInput: there is none.
        """
        self.device()
        cases = [case for case in self.cases(models, backends) if case.captured() is not None]
        if not cases:
            raise InvalidInput(f"{self.path} holds no capture of {', '.join(models)} ({', '.join(backends)})")
        return cases

    def cases(self, models: list[str], backends: list[str]) -> list[Case]:
        """All combinations; those of the first backend first."""
        backends = [name for name in BACKENDS if name in backends]
        return [self.case(model, backend) for backend in backends for model in MODELS if model in models]


def write_document(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file of the folder, atomically."""
    write_text(path, json.dumps({"format": FORMAT, **content}, indent=1))


def _read(path: Path) -> dict[str, Any]:
    document = read_json(path)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InvalidInput(f"{path}: is no file of the format {FORMAT}; remove it and run the command again")
    return document
