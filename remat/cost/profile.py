"""Cost = measured time: each distinct operation once, on the device at hand.

Operations are rebuilt from `Work.signature` with random inputs in a process of its own, warmed up, and timed
(median of repeated runs; those of PyTorch on a CPU with caches as in a step). Every measurement is a file of its
own in the cache, written as soon as it is there and keyed by signature, device and versions, so that nothing finished
is measured again. A time is finished when it is steady: what other processes disturb is measured again, first at once,
then by later calls; until it is steady, the roofline stands in.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remat.child import command as child_command
from remat.child import environment
from remat.cost.gpu import DEFAULT_GPU, Gpu, load_gpu
from remat.cost.records import TIME_FIELDS, cache_key, read_fields
from remat.cost.roofline import operation_ns
from remat.cost.stored import load_stored
from remat.errors import CostWarning, InvalidInput, MissingPackage, RematError, unknown_name, warn
from remat.files import write_text
from remat.graph import Graph, Operation, Work
from remat.units import format_size

DEVICES = ("cpu", "cuda")
_PACKAGES = {"torch": ("torch",), "tensorflow": ("tensorflow",), "keras": ("keras", "tensorflow")}
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
# An operation's tensors once, and as much again for what libraries allocate beside them (padding, im2col, gradients).
MEMORY_FACTOR = 2
# How often PyTorch's operations on a CPU are gone through, and what says that their times are not those of warm caches.
PASSES, AS_IN_STEP = 3, {"caches": "as in a step"}


@dataclass(frozen=True, slots=True)
class Noise:
    """How sure the costs of a graph are that come from measurements.

    Attributes:
        scatter: how far the medians are above the shortest times, over all measured operations, e.g. 0.08 for 8 %.
        measured: number of operations that were measured.
        modelled: number of operations that were not, or not steadily, and have the roofline's cost.
    """

    scatter: float
    measured: int
    modelled: int

    def __str__(self) -> str:
        calls = "operation" if self.measured == 1 else "operations"
        measured = f"{self.measured} {calls} measured to {self.scatter:.0%}" if self.measured else ""
        modelled = f"{self.modelled} by the roofline" if self.modelled else ""
        return ", ".join(filter(None, (measured, modelled)))


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured costs of a graph.

    Attributes:
        ns: [N] cost of each operation.
        unmeasured: {kind: why it was not measured}.
        unsteady: signatures of operations that the machine's other work disturbed too often.
        noise: None for stored measurements.
    """

    ns: list[int]
    unmeasured: dict[str, str]
    unsteady: set[str]
    noise: Noise | None


def profile_costs(
    graph: Graph, gpu: Gpu | None, cache_folder: str | os.PathLike[str] | None, device: str | None = None
) -> Profile:
    """Cost of each operation.

    Without a `device`, those that are stored for `gpu` are taken (`remat.cost.stored`), and nothing is measured.
    What cannot be rebuilt, is not stored, or was not timed steadily takes its roofline time: of ``gpu=cpu``
    on a CPU, else of `gpu`. Beside times that were measured here it is scaled as these are, all in all.

    Raises:
        InvalidInput: unknown or absent device, or an operation that needs more memory than is free.
        MissingPackage: the framework of the operations is not installed.
    """
    stored = load_stored(gpu.name) if device is None and gpu is not None else None
    if stored is not None:
        signatures = _signatures(graph)
        measured = {signature: (stored.ns[signature],) for signature in signatures if signature in stored.ns}
        failures = dict.fromkeys(signatures.keys() - measured, f"not in {stored.path}")
        fallback = gpu
    else:
        if device is None and gpu is not None and gpu.name not in (DEFAULT_GPU, "cpu"):
            warn(
                f"no measurements of {gpu.name} are stored: measured on this machine instead; "
                f"cost=roofline models {gpu.name}", CostWarning,
            )  # fmt: skip
        device, measured, failures = _measured(graph, "time", TIME_FIELDS, cache_folder, device)
        fallback = load_gpu("cpu") if device == "cpu" else gpu
    works = [op.work or Work(bytes_moved=sum(graph.values[v].bytes for v in (*op.inputs, *op.outputs)))
             for op in graph.operations]  # fmt: skip
    times = [measured.get(work.signature) for work in works]
    roofline = [0 if fallback is None else operation_ns(op.kind, work, fallback, op.is_backward)
                for op, work in zip(graph.operations, works, strict=True)]  # fmt: skip
    scale = 1.0 if stored is not None else _scale(times, roofline)
    costs, unmeasured, unsteady, modelled = [], {}, set[str](), 0
    for op, work, time, modelled_ns in zip(graph.operations, works, times, roofline, strict=True):
        if work.is_free:
            costs.append(0)
        elif time is not None:
            costs.append(time[0])
        else:
            if fallback is None:
                raise InvalidInput(f"'{op.name}' ({op.kind}) cannot be measured; give a device for its roofline time")
            if work.signature and work.signature not in failures:
                unsteady.add(work.signature)
            else:
                unmeasured[op.kind] = failures.get(work.signature, "it cannot be rebuilt")
            costs.append(max(1, round(scale * modelled_ns)))
            modelled += 1
    n_measured = sum(time is not None and not work.is_free for time, work in zip(times, works, strict=True))
    noise = None if stored is not None else Noise(_scatter(times), n_measured, modelled)
    return Profile(costs, unmeasured, unsteady, noise)


def _scale(times: Iterable[tuple[int, ...] | None], roofline_ns: Iterable[int]) -> float:
    """What measured times are of the roofline's, all in all; 1 where nothing was measured."""
    known = [(time[0], ns) for time, ns in zip(times, roofline_ns, strict=True) if time is not None]
    modelled_ns = sum(ns for _, ns in known)
    return sum(ns for ns, _ in known) / modelled_ns if modelled_ns else 1.0


def _scatter(times: Iterable[tuple[int, ...] | None]) -> float:
    """By which share medians are above the shortest times, all in all."""
    known = [time for time in times if time is not None]
    best_ns = sum(time[1] for time in known)
    return sum(time[0] for time in known) / best_ns - 1 if best_ns else 0.0


def profile_workspaces(
    graph: Graph, cache_folder: str | os.PathLike[str] | None, device: str | None = None
) -> tuple[list[int], dict[str, str]]:
    """(bytes each operation takes from the allocator beside inputs and outputs while it runs [N], {kind: why not}).

    Measured as times are, one run of each distinct operation; what cannot be rebuilt keeps the workspace that
    the graph gives it. Only PyTorch operations can be measured.

    Raises: as `profile_costs`.
    """
    _, measured, failures = _measured(graph, "workspace", ("workspace_bytes",), cache_folder, device)
    sizes, unmeasured = [], {}
    for op in graph.operations:
        signature = op.work.signature if op.work else ""
        if signature in measured:
            sizes.append(measured[signature][0])
            continue
        sizes.append(op.workspace_bytes)
        if op.work is not None and not op.work.is_free:
            unmeasured[op.kind] = failures.get(signature, "it cannot be rebuilt")
    return sizes, unmeasured


def _measured(
    graph: Graph, quantity: str, fields: tuple[str, ...], cache_folder: str | os.PathLike[str] | None,
    device: str | None,
) -> tuple[str, dict[str, tuple[int, ...]], dict[str, str]]:  # fmt: skip
    """(device, {signature: its measured fields}, {signature: why it failed}); what is in neither is not steady."""
    needed = _signatures(graph)
    frameworks = sorted({json.loads(signature)["fw"] for signature in needed})
    device, label, free_bytes = _device(device, frameworks)
    provenance, passes = {"device": label, "versions": _versions(frameworks)}, 1
    if quantity == "time" and _is_as_in_step(device, frameworks):
        provenance, passes = provenance | AS_IN_STEP, PASSES
    elif quantity == "workspace":
        provenance |= {"outputs": "asked for"}  # earlier versions took all that a kernel makes for its outputs
    keys = {signature: cache_key(signature, provenance) for signature in needed}
    suffix = ".json" if quantity == "time" else f".{quantity}.json"
    with tempfile.TemporaryDirectory(prefix="remat-profile-") as scratch:
        folder = Path(cache_folder or scratch)

        def read(some: Iterable[str]) -> dict[str, tuple[int, ...]]:
            return {key: found for key in some if (found := read_fields(folder / f"{key}{suffix}", fields)) is not None}

        measured = read(keys.values())
        missing = {keys[s]: s for s in needed if keys[s] not in measured}
        _check_memory({s: needed[s] for s in missing.values()}, free_bytes, label)
        if missing:
            _check_writable(folder)
        job = {"quantity": quantity, "fields": fields, "passes": passes, "suffix": suffix, "device": device,
               "folder": str(folder.resolve()), "provenance": provenance}  # fmt: skip
        failures = _measure(missing, job, Path(scratch), read)
        measured |= read(missing)
    return (
        device,
        {signature: measured[key] for signature, key in keys.items() if key in measured},
        {signature: failures[key] for signature, key in keys.items() if key in failures},
    )


def _signatures(graph: Graph) -> dict[str, Operation]:
    """Distinct signatures to measure, each with the first operation that has it."""
    found: dict[str, Operation] = {}
    for op in graph.operations:
        if op.work is not None and op.work.signature and not op.work.is_free:
            found.setdefault(op.work.signature, op)
    return found


def _versions(frameworks: Iterable[str]) -> dict[str, str]:
    versions = {}
    for package in sorted({package for framework in frameworks for package in _PACKAGES[framework]}):
        for distribution in _DISTRIBUTIONS.get(package, (package,)):
            try:
                versions[package] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
        else:
            extra = "torch" if package == "torch" else "tensorflow"
            raise MissingPackage(f"cost=profile needs {package}: pip install 'remat[{extra}]'")
    return versions


def machine(frameworks: list[str]) -> tuple[str, dict[str, str]]:
    """(CPU and threads, versions of the frameworks): what measurements on this machine's CPU depend on."""
    return f"{_cpu_name()}, {_threads(frameworks)} threads", _versions(frameworks)


def provenance_of(device: str) -> dict[str, Any]:
    """What times of PyTorch operations on ``cpu`` or ``cuda`` are kept under: device, versions, how they are taken."""
    known = {"device": _device(device, ["torch"])[1], "versions": _versions(["torch"])}
    return known | AS_IN_STEP if _is_as_in_step(device, ["torch"]) else known


def _is_as_in_step(device: str, frameworks: list[str]) -> bool:
    return device == "cpu" and frameworks == ["torch"]


def _device(device: str | None, frameworks: list[str]) -> tuple[str, str, int]:
    """(``cpu`` or ``cuda``, what identifies it, free bytes)."""
    if device is not None and device not in DEVICES:
        raise unknown_name("device", device, DEVICES)
    if device == "cuda" and frameworks != ["torch"]:
        raise InvalidInput("cost=profile measures on CUDA through PyTorch only; use device=cpu")
    if device == "cuda" or (device is None and frameworks == ["torch"]):
        name, free_bytes = _cuda()
        if name:
            return "cuda", name, free_bytes
        if device == "cuda":
            raise InvalidInput("device=cuda, but PyTorch finds no CUDA device here; use device=cpu")
    return "cpu", machine(frameworks)[0], _available_bytes()


def _cuda() -> tuple[str, int]:
    """(name of the CUDA device, free bytes); ('', 0) without one. A child asks PyTorch, which is not imported here."""
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        return "", 0
    question = (
        "import torch\nif torch.cuda.is_available(): print(torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False).stdout
    free_bytes, _, name = answer.strip().partition(" ")
    return (name, int(free_bytes)) if name else ("", 0)


@functools.cache
def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _threads(frameworks: list[str]) -> int:
    """Threads of the CPU's kernels, as many as this process has them use."""
    torch = sys.modules.get("torch")
    if frameworks == ["torch"] and torch is not None:
        return torch.get_num_threads()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_writable(folder: Path) -> None:
    """Refuse before anything is measured: each measurement comes back as a file."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(
            f"measurements cannot be kept in {folder} ({error.strerror}): give another cache_folder= or set REMAT_CACHE"
        ) from None


def _check_memory(needed: Mapping[str, Operation], free_bytes: int, label: str) -> None:
    def need(op: Operation) -> int:
        return MEMORY_FACTOR * (op.work.bytes_moved if op.work else 0)

    largest = max(needed.values(), key=need, default=None)
    if largest is not None and need(largest) > free_bytes:
        raise InvalidInput(
            f"measuring '{largest.name}' ({largest.kind}) needs about {format_size(need(largest))}, {label} has "
            f"{format_size(free_bytes)} free; use a smaller batch_size= or cost=roofline"
        )


def _measure(
    missing: Mapping[str, str], job: Mapping[str, Any], scratch: Path,
    read: Callable[[Iterable[str]], Mapping[str, Any]],
) -> dict[str, str]:  # fmt: skip
    """Measure in child processes; a crash costs the operation that was running. Returns {key: failure}."""
    rest, failures = dict(missing), {}
    job_path = scratch / "job.json"
    while rest:
        frameworks = sorted({json.loads(signature)["fw"] for signature in rest.values()})
        this = {
            "signatures": rest,
            "threads": _threads(frameworks),
            "frameworks": frameworks,
        }
        write_text(job_path, json.dumps({**job, **this}))
        child = subprocess.run(
            child_command("remat._profile_worker", str(job_path)),
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False,
            env=environment({"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}),
        )  # fmt: skip
        lines = [line.split(" ", 2) for line in child.stdout.splitlines()]
        failures |= {words[1]: words[2] for words in lines if words[0] == "failed"}
        if child.returncode == 0:
            return failures
        started = [words[1] for words in lines if words[0] == "start"]
        if not started:
            complaint = (child.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise RematError(f"the profiling process ended with code {child.returncode}: {complaint[:300]}")
        failures[started[-1]] = f"its process ended with code {child.returncode}"
        done = read(rest).keys() | failures.keys()
        rest = {key: signature for key, signature in rest.items() if key not in done}
    return failures
