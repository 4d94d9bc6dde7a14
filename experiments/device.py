"""``python -m experiments.device``: predicted and measured memory, times, bits and largest batches of steps on a GPU.

The device needs PyTorch, NumPy, Numba and SciPy alone, so this module imports nothing else. Each row is
captured, planned and executed in a process of its own, because an error of CUDA leaves a process that cannot go on.
docs/how-to/measure-a-gpu.md says what to run.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from experiments.arguments import Parser, argument, count, fractions, names_of, one_of, run, seconds
from experiments.provenance import provenance
from experiments.steps.sizes import ON_A_GPU, SIZES, spec_at
from experiments.steps.torch_runs import built, step_seconds, times_beside
from remat.child import command, environment, last_line
from remat.cost import COST_MODELS
from remat.cost.profile import DEVICES, provenance_of
from remat.cost.stored import RESULTS_FOLDER, store
from remat.errors import InvalidInput, RematError
from remat.execution import StepPlan
from remat.files import read_json, read_lines, write_lines, write_text
from remat.frontends.spec import ModelSpec
from remat.largest import SizeSearch
from remat.torch import rematerialize
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning.capturing import default_gpu
from remat.torch.planning.planner import there_before
from remat.units import parse_size

T = TypeVar("T")
BACKENDS = ("eager", "inductor")
FOLDER = Path("runs/device")
SHARES = [0.8, 0.6, 0.45, 0.3]  # of the plain step's peak
PLAIN, PLANNED, LARGEST, LARGEST_PLANNED = "plain", "plan", "largest plain batch", "largest planned batch"
UNLIMITED = 1 << 60  # a budget in which nothing is recomputed
MARGIN = 0.97  # of the memory that is free; the rest is left to fragmentation
# Segments that can grow are split at every 512 bytes, so that the allocator counts what a tensor takes. Other blocks
# keep a rest of up to 1 MiB. PyTorch ignores the setting on a CPU.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def measured_row(case: dict[str, Any]) -> dict[str, Any]:
    """The row of a case, which is JSON: `cases` lists its keys."""
    spec = spec_at(case["model"], case["size"])
    if case["method"] in (LARGEST, LARGEST_PLANNED):
        return _largest(spec, case)
    budget = UNLIMITED if case["method"] == PLAIN else case["share"]
    try:
        step = _Step(spec, case, budget, case["cost"], is_planned=case["method"] == PLANNED)
    except InvalidInput as error:
        if case["method"] == PLAIN:
            raise
        return {"batch": spec.batch_size, "note": str(error)}  # no plan is that small
    row = {"batch": spec.batch_size} | step.promises()
    found = _within_memory(step.peaks)
    if found is None:
        return row | {"note": "out of memory"}
    row |= found
    times = _within_memory(lambda: step.times_beside_plain(case["rounds"]))
    row |= {"measured_s": step.seconds(case["rounds"])} if times is None else times
    difference = _within_memory(step.difference)
    return row | ({"note": "no memory to compare the bits"} if difference is None else {"difference": difference})


class _Step:
    """A network on the device: its plain step, and its step under the plan of a budget.

    Args:
        budget: bytes, or a share of the plain step's peak.
        is_planned: measure the planned step, not the plain one.
    """

    def __init__(self, spec: ModelSpec, case: dict[str, Any], budget: float, cost: str, *, is_planned: bool):
        self.device, self.is_planned = case["device"], is_planned
        self.model, self.args = built(spec, self.device)
        compiles = case["backend"] == "inductor"
        self.plain: Any = torch.compile(self.model, fullgraph=True, dynamic=False) if compiles else self.model
        planned = rematerialize(
            self.model, self.args, budget, backend=case["backend"], cost=cost, time_limit_s=case["time_limit_s"],
            threads=case["threads"], cache_folder=Path(case["folder"]) / "costs",
        )  # fmt: skip
        self.plan: StepPlan = planned.plan
        self.run: nn.Module = planned if is_planned else self.plain

    def promises(self) -> dict[str, Any]:
        """What the plan says of the step."""
        plan = self.plan
        if not self.is_planned:
            return {"predicted_peak_bytes": plan.plain_peak_bytes}
        return {"budget_bytes": plan.budget_bytes, "predicted_peak_bytes": plan.peak_bytes,
                "predicted_overhead": plan.overhead, "recomputed": len(plan.recomputed)}  # fmt: skip

    def peaks(self) -> dict[str, Any]:
        """Measured peaks: resident tensors and what a step adds; on CUDA the allocator's own peaks, too."""
        peak_of_step(self.run, self.args, {}, self.device)  # compiles, which may take memory that is kept
        _release()
        peak = there_before(self.plan) + peak_of_step(self.run, self.args, {}, self.device)
        found = {"measured_peak_bytes": peak}
        if self.device == "cuda":
            found |= {"allocated_bytes": torch.cuda.max_memory_allocated(),
                      "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip
        return found

    def seconds(self, rounds: int) -> float:
        """The median of several steps."""
        return statistics.median(step_seconds(self.run, self.args, self.device) for _ in range(rounds))

    def times_beside_plain(self, rounds: int) -> dict[str, Any]:
        """Times of steps that take turns with the plain step."""
        step_seconds(self.plain, self.args, self.device)  # may compile
        return times_beside(self.plain, self.run, self.args, self.device, rounds)

    def difference(self) -> float:
        """How much the step differs from the plain eager one; 0 for the same bits."""
        return difference_of_steps(self.model, self.run, self.args, {}, self.device)


def _largest(spec: ModelSpec, case: dict[str, Any]) -> dict[str, Any]:
    """The row of the largest batch that trains within the memory, plain or under a plan."""
    memory = case["memory_bytes"] or int(MARGIN * torch.cuda.mem_get_info()[0])
    step = _Step(spec, case, UNLIMITED, "flops", is_planned=False)
    fixed, plain = step.plan.graph.fixed_bytes, step.plan.plain_peak_bytes or memory
    del step
    search, best = SizeSearch(max(1, spec.batch_size * (memory - fixed) // max(1, plain - fixed))), {}
    for _ in range(case["tries"]):
        batch = search.next_size()
        if batch is None:
            break
        found = _within_memory(lambda batch=batch: _trained(replace(spec, batch_size=batch), case, memory))
        print(f"  {case['method']}: {batch} {'trains' if found else 'does not train'}", file=sys.stderr, flush=True)
        search.learn(batch, fits=bool(found), impossible=not found)
        best = found or best
    if not best:
        best = {"note": "no batch that was tried trains"}
    return best | {"budget_bytes": memory, "failed_batch": search.ruled_out}


def _trained(spec: ModelSpec, case: dict[str, Any], memory: int) -> dict[str, Any]:
    """Measurements of a batch; nothing if it does not stay within the memory."""
    torch.compiler.reset()
    is_planned = case["method"] == LARGEST_PLANNED
    try:  # costs of a roofline: to time the kernels of every batch would take longer than all trials
        step = _Step(spec, case, memory if is_planned else UNLIMITED, "roofline", is_planned=is_planned)
    except InvalidInput:  # no plan is that small
        return {}
    peaks = step.peaks()
    if peaks["measured_peak_bytes"] > memory:
        return {}
    return {"batch": spec.batch_size, **step.promises(), **peaks, "measured_s": step.seconds(3)}


def _within_memory(measure: Callable[[], T]) -> T | None:
    """What is measured; None if the device's memory was not enough."""
    try:
        return measure()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    finally:
        _release()
    return None


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a step ended because the device's memory was full: the allocator says so, or a library or a compiler."""
    while error is not None:
        text = str(error).lower()
        if type(error).__name__ == "OutOfMemoryError" or "out of memory" in text or "alloc_failed" in text:
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise InvalidInput("PyTorch finds no CUDA device here; measure with --device cpu, or on the device")


def described(device: str) -> dict[str, Any]:
    """The device and the versions, as rows have them."""
    name, known = "cpu", default_gpu(device).name
    if device == "cuda":
        name = torch.cuda.get_device_name()
        name = known if known.partition("_")[0] in name.lower().replace(" ", "") else "_".join(name.lower().split())
    return {"gpu": name, "costs_of": provenance_of(device), "date": datetime.date.today().isoformat(),
            **asdict(provenance())}  # fmt: skip


def cases(given: Any) -> Iterator[dict[str, Any]]:
    """Every row that the command line asks for; what is worth the most first."""
    common = {name: getattr(given, name) for name in ("device", "size", "cost", "time_limit_s", "threads", "rounds")}
    for backend in given.backends:
        for model in given.models:
            head = {"model": model, "backend": backend}
            yield {**head, "method": PLAIN, **common}
            for share in given.budgets:
                yield {**head, "method": PLANNED, "share": share, **common}
    if given.device == "cpu" and not given.memory:
        return  # to fill the machine's memory would take a day
    for backend in given.backends:
        for model in given.models:
            for method in (LARGEST, LARGEST_PLANNED):
                batch = {"memory_bytes": given.memory, "tries": given.tries}
                yield {"model": model, "backend": backend, "method": method, **common, **batch}


def main(arguments: list[str] | None = None) -> int:
    """Measure what the folder lacks, or keep its rows and costs; returns the exit code."""
    given = _read(arguments)
    if given.keep:
        for path in keep(given.folder, given.out):
            print(f"written {path}")
        return 0
    _check_device(given.device)
    path, began, asked = given.folder / "rows.jsonl", time.monotonic(), list(cases(given))
    rows = list(read_lines(path))
    missing = [case for case in asked if case not in [row["case"] for row in rows if "error" not in row]]
    print(f"{len(missing)} of {len(asked)} rows to measure")
    for i, case in enumerate(missing):
        left = None if given.minutes is None else 60 * given.minutes - (time.monotonic() - began)
        if left is not None and left <= 0:
            print(f"the time is up: {len(missing) - i} left; the same command goes on from here")
            break
        row = {"case": case, **_in_child(case, given.folder, left)}
        _check_same(row, rows, given.folder)
        rows = [*(other for other in rows if other["case"] != case), row]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, rows)
        print(f"[{i + 1}/{len(missing)}] {line_of(row)}", flush=True)
    return 0 if any("measured_s" in row for row in rows) else 1


def _check_same(row: dict[str, Any], others: list[dict[str, Any]], folder: Path) -> None:
    """Refuse rows of several devices or versions of PyTorch in one folder."""
    for other in others:
        if "costs_of" in row and other.get("costs_of", row["costs_of"]) != row["costs_of"]:
            raise InvalidInput(
                f"{folder} has rows of {other['costs_of']}, here it is {row['costs_of']}: take another folder"
            )


def _in_child(case: dict[str, Any], folder: Path, limit_s: float | None) -> dict[str, Any]:
    """The row of a case from another process, or its error."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryFile() as errors:
        files = Path(scratch, "case.json"), Path(scratch, "row.json")
        write_text(files[0], json.dumps(case | {"folder": str(folder.resolve())}))
        child = subprocess.Popen(
            command("experiments.device", "row", *map(str, files)), stdout=errors, stderr=errors,
            env=ALLOCATOR | environment({}, here=True),
        )  # fmt: skip
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return {"error": "the time was up"}
        finally:
            child.kill()
            child.wait()
        if child.returncode:
            return {"error": last_line(errors) or f"its process ended with code {child.returncode}"}
        return read_json(files[1])


def line_of(row: dict[str, Any]) -> str:
    """A row as a line of text."""
    case = row["case"]
    head = " ".join(str(case[key]) for key in ("model", "backend", "method", "share") if key in case)
    if "error" in row:
        return f"{head}: {row['error']}"
    texts = [f"batch {row['batch']}"] if "batch" in row else []
    for key in ("predicted_peak", "measured_peak", "allocated", "reserved"):
        size = row.get(f"{key}_bytes")
        texts += [f"{size / 1e6:.1f} MB {key.replace('_', ' ')}"] if size else []
    texts += [f"{1000 * row['measured_s']:.1f} ms"] if "measured_s" in row else []
    for key, text in (("predicted_overhead", "predicted {:+.1%}"), ("difference", "differs by {:.1e}"),
                      ("measured_ratio", "{:.3f} of the plain step's time"), ("failed_batch", "{} does not train"),
                      ("note", "{}")):  # fmt: skip
        texts += [text.format(row[key])] if row.get(key) else []
    return f"{head}: {', '.join([*texts, *(['same bits'] if row.get('difference') == 0 else [])])}"


def keep(folder: Path, out: Path) -> list[Path]:
    """Write rows and measured costs below `out`, in the folder of their device; returns the files.

    Raises:
        InvalidInput: the folder has no rows.
    """
    path = folder / "rows.jsonl"
    rows = [row for row in read_lines(path) if "error" not in row]
    if not rows:
        raise InvalidInput(f"{folder} holds no rows: run python -m experiments.device {folder} on the device")
    last = rows[-1]
    written = [out / last["gpu"] / f"{last['date']}_device.json"]
    write_text(written[0], json.dumps({"format": "remat-device/2", "rows": rows}, indent=1) + "\n")
    if any(row["case"]["cost"] == "profile" for row in rows):
        written.append(store(folder / "costs", last["gpu"], last["costs_of"], out))
    return written


def _read(arguments: list[str] | None) -> Any:
    """What the command line asks for; raises `InvalidInput`."""
    given = _parser().parse_args(arguments)
    given.models = names_of("model", given.models, ON_A_GPU)
    given.backends = names_of("backend", given.backends, BACKENDS)
    for what, known in (("device", DEVICES), ("size", SIZES), ("cost", COST_MODELS)):
        one_of("cost model" if what == "cost" else what, getattr(given, what), known)
    return given


def _parser() -> Parser:
    parser = Parser(prog="python -m experiments.device", description="measure planned steps on a device")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"of rows and costs (default: {FOLDER})")
    parser.add_argument("--keep", action="store_true", help="measure nothing; write rows and costs to --out")
    parser.add_argument("--models", default=[*ON_A_GPU], help=", ".join(ON_A_GPU))
    parser.add_argument("--backends", default=[*BACKENDS], help=", ".join(BACKENDS))
    parser.add_argument("--device", default="cuda", help="to measure on")
    parser.add_argument("--size", default="gpu", help=", ".join(SIZES))
    parser.add_argument("--cost", default="profile", help=f"of operations: {', '.join(COST_MODELS)}")
    parser.add_argument("--minutes", type=seconds, help="measure no longer than this; run again to go on")
    parser.add_argument("--budgets", type=fractions, default=SHARES, help="shares of the plain peak, e.g. 0.8,0.6")
    parser.add_argument("--time-limit", type=seconds, default=20.0, dest="time_limit_s", help="seconds per plan")
    parser.add_argument("--threads", type=count, default=min(8, os.cpu_count() or 2), help="of a solver")
    parser.add_argument("--rounds", type=count, default=10, help="timed steps of each plan")
    parser.add_argument("--memory", type=argument(parse_size),
                        help="limit for the largest batches, e.g. 8GB; on CUDA what is free")  # fmt: skip
    parser.add_argument("--tries", type=count, default=8, help="batches to try for each largest one")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder of the devices' folders")
    return parser


def _work(asked: str, made: str) -> int:
    """Measure the case of a file, in this process."""
    case = read_json(Path(asked))
    try:
        row = described(case["device"]) | measured_row(case)
    except RematError as error:
        sys.exit(" ".join(str(error).split()))
    write_text(Path(made), json.dumps(row))
    return 0


if __name__ == "__main__":
    run(lambda: _work(*sys.argv[2:]) if sys.argv[1:2] == ["row"] else main())
