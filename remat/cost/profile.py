"""Cost = measured time: each distinct operation once, on the device at hand.

A separate process rebuilds operations from `Work.signature` with random inputs, warms them up and times them
(median of repeated runs; PyTorch on a CPU with caches as in a step). Each measurement is written at once to its own
file in the cache, keyed by signature, device and versions, so that nothing finished is measured again. A time is
finished when it is steady: a disturbed operation is measured again, first at once, then by later calls; until it is
steady, it has the roofline's cost.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from remat.child import command as child_command
from remat.child import environment, last_line
from remat.cost.gpu import DEFAULT_GPU, Gpu, load_gpu
from remat.cost.records import TIME_FIELDS, cache_key, read_fields, write_record
from remat.cost.roofline import operation_ns, work_of
from remat.cost.stored import load_stored
from remat.errors import CostWarning, InvalidInput, MissingPackage, RematError, shortened, unknown_name, warn
from remat.files import write_text
from remat.graph import Graph, Operation
from remat.units import format_size

DEVICES = ("cpu", "cuda")
_PACKAGES = {"torch": ("torch",), "tensorflow": ("tensorflow",), "keras": ("keras", "tensorflow")}
_DISTRIBUTIONS = {"tensorflow": ("tensorflow", "tensorflow-cpu")}
# An operation's tensors once, and as much again because libraries allocate more (padding, im2col, gradients).
MEMORY_FACTOR = 2
AS_IN_STEP = {"caches": "as in a step"}  # provenance of times of PyTorch's operations on a CPU: no warm caches
# Share of the graph's cost: operations that make up less are not worth another attempt to time them, nor a warning.
NEGLIGIBLE = 0.02
# (cache folder, key) of operations that this process could not time steadily, although each was measured several times.
_unsteady = set[tuple[Path, str]]()


@dataclass(frozen=True, slots=True)
class Noise:
    """Uncertainty of measured costs of a graph.

    Attributes:
        scatter: sum of the medians over the sum of the shortest times of all measured operations, minus 1: 0.08
            is 8 %.
        measured: number of measured operations.
        modelled: number of operations without a steady measurement, which have the roofline's cost.
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
        modelled: [N] whether the cost is the roofline's, for want of a measurement.
        unmeasured: {kind: reason that it was not measured}.
        unsteady: signatures of operations that other processes disturbed too often.
        unsteady_share: of the graph's cost that these operations make up.
        noise: None for stored measurements.
    """

    ns: list[int]
    modelled: list[bool]
    unmeasured: dict[str, str]
    unsteady: set[str]
    noise: Noise | None
    unsteady_share: float = 0.0


def profile_costs(
    graph: Graph, gpu: Gpu | None, cache_folder: str | os.PathLike[str] | None, device: str | None = None
) -> Profile:
    """Cost of each operation.

    Without a `device`, measurements that are stored for `gpu` are used (`remat.cost.stored`), and nothing is measured.
    An operation that cannot be rebuilt, is not stored, or has no steady time gets its roofline time: of ``gpu=cpu``
    on a CPU, else of `gpu`. If times were measured here, it is scaled by the ratio of all these to their
    roofline times.

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

        def is_enough(device: str, measured: Mapping[str, tuple[int, ...]]) -> bool:
            roofline = _roofline(graph, load_gpu("cpu") if device == "cpu" else gpu)
            times = [measured.get(work_of(graph, op).signature) for op in graph.operations]
            rest = sum(ns for time, ns in zip(times, roofline, strict=True) if time is None)
            return rest <= NEGLIGIBLE * sum(roofline)

        device, measured, failures = _measured(graph, "time", TIME_FIELDS, cache_folder, device, None, is_enough)
        fallback = load_gpu("cpu") if device == "cpu" else gpu
    works = [work_of(graph, op) for op in graph.operations]
    times = [measured.get(work.signature) for work in works]
    roofline = _roofline(graph, fallback)
    scale = 1.0 if stored is not None else _scale(times, roofline)
    modelled = [time is None and not work.is_free for work, time in zip(works, times, strict=True)]
    costs, unmeasured, unsteady, n_measured = [], {}, set[str](), 0
    for op, work, time, modelled_ns in zip(graph.operations, works, times, roofline, strict=True):
        if work.is_free:
            costs.append(0)
        elif time is not None:
            costs.append(time[0])
            n_measured += 1
        else:
            if fallback is None:
                raise InvalidInput(f"'{op.name}' ({op.kind}) cannot be measured; give a device for its roofline time")
            if work.signature and work.signature not in failures:
                unsteady.add(work.signature)
            else:
                unmeasured[op.kind] = failures.get(work.signature, "it cannot be rebuilt")
            costs.append(max(1, round(scale * modelled_ns)))
    noise = None if stored is not None else Noise(_scatter(times), n_measured, sum(modelled))
    doubtful = sum(cost for cost, work in zip(costs, works, strict=True) if work.signature in unsteady)
    return Profile(costs, modelled, unmeasured, unsteady, noise, doubtful / max(1, sum(costs)))


def _roofline(graph: Graph, gpu: Gpu | None) -> list[int]:
    """[N] ns of each operation; 0 without a device, and where nothing runs."""
    works = [(op, work_of(graph, op)) for op in graph.operations]
    return [
        0 if gpu is None or work.is_free else operation_ns(op.kind, work, gpu, op.is_backward) for op, work in works
    ]


def _scale(times: Iterable[tuple[int, ...] | None], roofline_ns: Iterable[int]) -> float:
    """Sum of the measured times over the sum of their roofline times; 1 where nothing was measured."""
    known = [(time[0], ns) for time, ns in zip(times, roofline_ns, strict=True) if time is not None]
    modelled_ns = sum(ns for _, ns in known)
    return sum(ns for ns, _ in known) / modelled_ns if modelled_ns else 1.0


def _scatter(times: Iterable[tuple[int, ...] | None]) -> float:
    """Sum of the medians over the sum of the shortest times, minus 1; 0 where nothing was measured."""
    known = [time for time in times if time is not None]
    best_ns = sum(time[1] for time in known)
    return sum(time[0] for time in known) / best_ns - 1 if best_ns else 0.0


def profile_workspaces(
    graph: Graph, cache_folder: str | os.PathLike[str] | None, device: str | None = None,
    measure: Callable[[str], int | None] | None = None,
) -> tuple[list[int], dict[str, str]]:  # fmt: skip
    """([N] bytes that each operation allocates beside inputs and outputs while it runs, {kind: why not measured}).

    Measured like times, in one run of each distinct operation; an operation that cannot be rebuilt keeps the
    workspace of the graph. Only PyTorch operations can be measured.

    Args:
        measure: gives the bytes of a signature in this process, because another one takes seconds to start; None for
            one that is not to be measured now.

    Raises: as `profile_costs`.
    """
    _, measured, failures = _measured(graph, "workspace", ("workspace_bytes",), cache_folder, device, measure)
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
    device: str | None, measure: Callable[[str], int | None] | None = None,
    is_enough: Callable[[str, Mapping[str, tuple[int, ...]]], bool] = lambda *_: False,
) -> tuple[str, dict[str, tuple[int, ...]], dict[str, str]]:  # fmt: skip
    """(device, {signature: measured fields}, {signature: why it failed}); a signature in neither is not steady.

    Args:
        is_enough: (device, what is known) -> whether to leave the rest, if an attempt to measure it was made before.
    """
    needed = _signatures(graph)
    frameworks = _frameworks(needed)
    device, label, free_bytes = _device(device, frameworks)
    provenance = {"device": label, "versions": _versions(frameworks)}
    if quantity == "time" and _is_as_in_step(device, frameworks):
        provenance |= AS_IN_STEP
    elif quantity == "workspace":
        provenance |= {"outputs": "asked for"}  # earlier versions counted every tensor that a kernel makes as output
    keys = {signature: cache_key(signature, provenance) for signature in needed}
    suffix = ".json" if quantity == "time" else f".{quantity}.json"
    with tempfile.TemporaryDirectory(prefix="remat-profile-") as scratch:
        folder = Path(cache_folder or scratch)

        def read(some: Iterable[str]) -> dict[str, tuple[int, ...]]:
            return {key: found for key in some if (found := read_fields(folder / f"{key}{suffix}", fields)) is not None}

        measured = read(keys.values())
        missing = {keys[s]: s for s in needed if keys[s] not in measured}
        known = {signature: measured[key] for signature, key in keys.items() if key in measured}
        if all((folder / f"{key}{suffix}").exists() for key in missing) and is_enough(device, known):
            missing = {}
        _check_memory({s: needed[s] for s in missing.values()}, free_bytes, label)
        if missing:
            _check_writable(folder)
        job = {"quantity": quantity, "fields": fields, "passes": 1, "suffix": suffix, "device": device,
               "folder": str(folder.resolve()), "provenance": provenance}  # fmt: skip
        if measure is None:
            missing = {key: s for key, s in missing.items() if (folder, key) not in _unsteady}
            failures = _measure(missing, job, Path(scratch), read)
        else:
            failures = _measure_here(missing, measure, fields[0], folder, suffix, provenance)
        measured |= read(missing)
        _unsteady.update((folder, key) for key in missing.keys() - measured.keys() - failures.keys())
    return (
        device,
        {signature: measured[key] for signature, key in keys.items() if key in measured},
        {signature: failures[key] for signature, key in keys.items() if key in failures},
    )


def _measure_here(
    missing: Mapping[str, str], measure: Callable[[str], int | None], field: str, folder: Path, suffix: str,
    provenance: Mapping[str, Any],
) -> dict[str, str]:  # fmt: skip
    """Measure in this process. Returns {key: failure}."""
    failures = {}
    for key, signature in missing.items():
        try:
            size = measure(signature)
        except Exception as error:  # operations raise errors of any class; the class is named in a warning
            failures[key] = shortened(f"{type(error).__name__}: {error}", 160)
            continue
        if size is None:
            failures[key] = "no time"
        else:
            write_record(folder / f"{key}{suffix}", {field: size, "signature": signature, **provenance})
    return failures


def _signatures(graph: Graph) -> dict[str, Operation]:
    """Distinct signatures to measure, each with the first operation that has it."""
    found: dict[str, Operation] = {}
    for op in graph.operations:
        if op.work is not None and op.work.signature and not op.work.is_free:
            found.setdefault(op.work.signature, op)
    return found


def _frameworks(signatures: Iterable[str]) -> list[str]:
    return sorted({json.loads(signature)["fw"] for signature in signatures})


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
    """(CPU and threads, versions of the frameworks), on which measurements on this machine's CPU depend."""
    return f"{cpu_name()}, {_threads(frameworks)} threads", _versions(frameworks)


def provenance_of(device: str) -> dict[str, Any]:
    """Provenance of the times of PyTorch operations on ``cpu`` or ``cuda``: device, versions, state of the caches."""
    known = {"device": _device(device, ["torch"])[1], "versions": _versions(["torch"])}
    return known | AS_IN_STEP if _is_as_in_step(device, ["torch"]) else known


def _is_as_in_step(device: str, frameworks: list[str]) -> bool:
    return device == "cpu" and frameworks == ["torch"]


def _device(device: str | None, frameworks: list[str]) -> tuple[str, str, int]:
    """(``cpu`` or ``cuda``, its identification, free bytes)."""
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
    """(name of the CUDA device, free bytes); ('', 0) without one. A child asks PyTorch if it does not use one here."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    if shutil.which("nvidia-smi") is None and not Path("/proc/driver/nvidia").exists():
        return "", 0
    question = (
        "import torch\nif torch.cuda.is_available(): print(torch.cuda.mem_get_info()[0], torch.cuda.get_device_name())"
    )
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=False).stdout
    free_bytes, _, name = answer.strip().partition(" ")
    return (name, int(free_bytes)) if name else ("", 0)


@functools.cache
def cpu_name() -> str:
    """The processor's name, from the operating system."""
    return _proc_field("cpuinfo", "model name") or platform.processor() or platform.machine()


def _proc_field(file: str, key: str) -> str:
    """The first field of that key in a file of /proc; '' without one, as on systems other than Linux."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def _threads(frameworks: list[str]) -> int:
    """Number of threads that CPU kernels of this process use."""
    torch = sys.modules.get("torch")
    if frameworks == ["torch"] and torch is not None:
        return torch.get_num_threads()
    return cpu_count()


def cpu_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _available_bytes() -> int:
    kib = _proc_field("meminfo", "MemAvailable").partition(" ")[0]
    return int(kib) * 1024 if kib else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _check_writable(folder: Path) -> None:
    """Refuse, before anything is measured, a folder that cannot take the files of measurements."""
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


class _Child:
    """A process that measures one job after the other; a new one takes its place if it ends."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it

    def begin(self, frameworks: Iterable[str]) -> subprocess.Popen[str]:
        """Start it if it does not run; it imports the frameworks at once."""
        if self.process is None:
            self.process = subprocess.Popen(
                child_command("remat._profile_worker", *frameworks),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, errors="replace",
                env=environment({"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}),
            )  # fmt: skip
        return self.process

    def measure(self, job: Path, frameworks: Iterable[str]) -> tuple[list[list[str]], int]:
        """(words of each line that it writes about a job, 0 or the exit code of a process that the job ended)."""
        process, found = self.begin(frameworks), list[list[str]]()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it ended before the job; it then writes no line
            process.stdin.write(f"{job}\n")
            process.stdin.flush()
        for line in process.stdout:
            found.append(line.removesuffix("\n").split(" ", 2))
            if found[-1] == ["end"]:
                return found, 0
        return found, self._end() or 1

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()  # it may be in the middle of a job that nobody waits for any more
            self._end()
        self.errors.close()

    def _end(self) -> int:
        process, self.process = self.process, None
        assert process is not None
        with contextlib.suppress(BrokenPipeError), process:
            pass
        return process.returncode


class _Children(threading.local):
    """The `kept` process that measures for this thread."""

    kept: _Child | None = None


_children = _Children()


@contextmanager
def one_child() -> Iterator[_Child]:
    """Let one process make all measurements of this thread in here, because it takes seconds to start."""
    before = _children.kept
    child = _children.kept = before or _Child()
    try:
        yield child
    finally:
        _children.kept = before
        if before is None:
            child.close()


def begin_to_measure(graph: Graph, cache_folder: str | os.PathLike[str] | None, device: str | None) -> None:
    """Start the process of `one_child` if it will measure workspaces of a graph, because its imports take seconds."""
    missing = list[str]()
    profile_workspaces(graph, cache_folder, device, missing.append)
    if missing and _children.kept is not None:
        _children.kept.begin(_frameworks(missing))


def _measure(
    missing: Mapping[str, str], job: Mapping[str, Any], scratch: Path,
    read: Callable[[Iterable[str]], Mapping[str, Any]],
) -> dict[str, str]:  # fmt: skip
    """Measure in a child process; a crash loses only the operation that was running. Returns {key: failure}."""
    rest, failures = dict(missing), {}
    job_path = scratch / "job.json"
    with one_child() as child:
        while rest:
            frameworks = _frameworks(rest.values())
            this = {"signatures": rest, "threads": _threads(frameworks), "frameworks": frameworks}
            write_text(job_path, json.dumps({**job, **this}))
            lines, code = child.measure(job_path, frameworks)
            failures |= {words[1]: words[2] for words in lines if words[0] == "failed"}
            if code == 0:
                break
            started = [words[1] for words in lines if words[0] == "start"]
            if not started:
                complaint = last_line(child.errors) or "it printed nothing"
                raise RematError(f"the profiling process ended with code {code}: {complaint}")
            failures[started[-1]] = f"its process ended with code {code}"
            done = read(rest).keys() | failures.keys()
            rest = {key: signature for key, signature in rest.items() if key not in done}
    return failures
