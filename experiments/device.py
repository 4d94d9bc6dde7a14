"""``python -m experiments.device``: predicted and measured memory, times, bits and largest batches of steps on a GPU.

The device needs PyTorch, NumPy, Numba and SciPy alone, so this module imports nothing else before `keep`. A process
measures the rows of a network; an error of CUDA, which leaves a process that cannot go on, costs one row.
docs/how-to/measure-a-gpu.md says what to run.
"""

import argparse
import datetime
import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from experiments.arguments import Parser, argument, count, fractions, names_of, one_of, run, seconds
from experiments.provenance import provenance
from experiments.steps.sizes import ON_A_GPU, SIZES, spec_at
from experiments.steps.torch_runs import built, spread, step_seconds, times_beside
from remat.child import command, environment, last_line
from remat.cost import COST_MODELS
from remat.cost.profile import DEVICES, provenance_of
from remat.cost.stored import store
from remat.errors import InvalidInput, RematError
from remat.execution import StepPlan
from remat.files import digest_of, read_json, read_lines, write_lines, write_text
from remat.frontends.json import load_graph, save_graph
from remat.frontends.spec import ModelSpec
from remat.incumbent import relative_gap
from remat.largest import SizeSearch
from remat.plan import Plan
from remat.search.ready import begin_compiling, ready_by
from remat.simulator import simulate
from remat.torch import follow, rematerialize
from remat.torch.measuring.measure import difference_of_steps, peak_of_step
from remat.torch.planning.capturing import default_gpu
from remat.torch.planning.planner import there_before
from remat.units import parse_size

T = TypeVar("T")
Row = dict[str, Any]  # JSON-ready; `groups` has the keys of a case
Case = Row
BACKENDS = ("eager", "inductor")
FOLDER, ROWS = Path("runs/device"), "rows.jsonl"
OWN_PROCESS = "--own-process"  # the first argument of a process that measures one network; no folder's name
MODELS = [*ON_A_GPU][:3]  # unless others are asked for
SHARES = [0.8, 0.6, 0.45]  # of the plain step's peak
PLAIN, PLANNED, LARGEST = "plain", "plan", ("largest plain batch", "largest planned batch")
UNLIMITED = 1 << 60  # a budget in which nothing is recomputed
MARGIN = 0.97  # of the memory that is free; the rest is left to fragmentation
TRIES, CLOSE = 8, 0.02  # batches to try for a largest one; share of it that ends the search
SHOWN = {
    "error": "{}", "batch": "batch {}", "predicted_peak_bytes": "{:,} B promised",
    "measured_peak_bytes": "{:,} B measured", "allocated_bytes": "{:,} allocated", "reserved_bytes": "{:,} reserved",
    "measured_s": "{:.4f} s", "predicted_overhead": "{:+.1%} promised", "difference": "differs by {:.1e}",
    "measured_ratio": "{:.3f} of the plain step's time", "gap": "gap {:.2%}", "failed_batch": "{} does not train",
    "note": "{}",
}  # fmt: skip
# Segments that can grow are split at every 512 bytes, so that the allocator counts what a tensor takes. Other blocks
# keep a rest of up to 1 MiB. PyTorch ignores the setting on a CPU.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Network:
    """A network on the device, captured once for all of its plans."""

    def __init__(self, spec: ModelSpec, case: Case, folder: Path):
        self.spec, self.case, self.device, self.folder = spec, case, case["device"], folder
        self.model, self.args = built(spec, self.device)
        compiles = case["backend"] == "inductor"
        self.plain: Any = torch.compile(self.model, fullgraph=True, dynamic=False) if compiles else self.model

    def planned(self, budget: float, cost: str, name: str = "") -> Any:
        """The module within a budget: bytes, or a share of the plain step's peak.

        Args:
            name: of the files that keep graph and plan; a plan that is there is followed. '' keeps none.
        """
        graph, plan = files_of(self.folder, name)
        how = {"backend": self.case["backend"], "cache_folder": self.folder / "costs"}
        if name and plan.exists():
            return follow(self.model, self.args, plan, **how)
        if name:
            ready_by(math.inf)  # the child of this process that compiles the search
        limits = {key: self.case[key] for key in ("time_limit_s", "threads")}
        module = rematerialize(self.model, self.args, budget, strategy="search", cost=cost, **limits, **how)
        if name:
            save_graph(module.plan.graph, graph)
            module.plan.save(plan)
        return module

    def row(self, case: Case) -> Row:
        """The row of the plain step, or of the planned one."""
        is_plain, row = case["method"] == PLAIN, {"batch": self.spec.batch_size}
        name = "" if is_plain else name_of(case)
        try:
            module = self.planned(UNLIMITED if is_plain else case["share"], case["cost"], name)
        except InvalidInput as error:
            if is_plain:
                raise
            return row | {"note": str(error)}  # no plan is that small
        step = self.plain if is_plain else module
        row |= {"plan": name, **promises(module.plan, is_plain=is_plain)}
        measures = (
            lambda: self.peaks(step, module.plan),
            lambda: self.times(step, case["rounds"]),
            lambda: {"difference": difference_of_steps(self.model, step, self.args, {}, self.device)},
        )
        for measure in measures:
            found = _within_memory(measure)
            if found is None:
                return row | {"note": "out of memory" + (" to compare the bits" if "measured_s" in row else "")}
            row |= found
        return row

    def peaks(self, step: Any, plan: StepPlan) -> Row:
        """Measured peaks: resident tensors and what a step adds; on CUDA the allocator's own peaks, too."""
        peak_of_step(step, self.args, {}, self.device)  # compiles, which may take memory that is kept
        _release()
        found = {"measured_peak_bytes": there_before(plan) + peak_of_step(step, self.args, {}, self.device)}
        if self.device == "cuda":
            found |= {"allocated_bytes": torch.cuda.max_memory_allocated(),
                      "reserved_bytes": torch.cuda.max_memory_reserved()}  # fmt: skip
        return found

    def times(self, step: Any, rounds: int) -> Row:
        """Times of steps that take turns with the plain step; alone, if that does not fit."""

        def beside() -> Row:
            step_seconds(self.plain, self.args, self.device)  # may compile
            return times_beside(self.plain, step, self.args, self.device, rounds)

        return _within_memory(beside) or spread([step_seconds(step, self.args, self.device) for _ in range(rounds)])


def promises(plan: StepPlan, *, is_plain: bool) -> Row:
    """What a plan says of its step, and where the seconds went that made it."""
    if is_plain:
        return {"predicted_peak_bytes": plan.plain_peak_bytes, "plan_s": plan.phases}
    return {"budget_bytes": plan.budget_bytes, "predicted_peak_bytes": plan.peak_bytes, "plan_s": plan.phases,
            "predicted_overhead": plan.overhead, "recomputed": len(plan.recomputed)}  # fmt: skip


def files_of(folder: Path, name: str) -> tuple[Path, Path]:
    """The files of a row's graph and plan."""
    return folder / "plans" / f"{name}.graph.json.gz", folder / "plans" / f"{name}.plan.json.gz"


def largest(case: Case, folder: Path) -> Row:
    """The row of the largest batch that trains within the memory, plain or under a plan; trials are kept in a file."""
    spec, path = spec_at(case["model"], case["size"]), folder / "trials" / f"{name_of(case)}.json"
    if not path.exists():
        memory = case["memory_bytes"] or int(MARGIN * torch.cuda.mem_get_info()[0])
        plan = Network(spec, case, folder).planned(UNLIMITED, "flops").plan
        fixed, plain = plan.graph.fixed_bytes, plan.plain_peak_bytes or memory
        first = max(1, spec.batch_size * (memory - fixed) // max(1, plain - fixed))
        write_text(path, json.dumps({"memory_bytes": memory, "first": first, "found": {}}))
    known = read_json(path)
    search, found, best = SizeSearch(known["first"], share=CLOSE), known["found"], Row()
    for _ in range(TRIES):
        batch = search.next_size()
        if batch is None:
            break
        if str(batch) not in found:
            new = replace(spec, batch_size=batch)
            found[str(batch)] = _within_memory(lambda new=new: _trained(new, case, known["memory_bytes"], folder))
            write_text(path, json.dumps(known))
            print(f"  {batch} {'trains' if found[str(batch)] else 'does not train'}", flush=True)
        row = found[str(batch)]
        search.learn(batch, fits=bool(row), impossible=not row)
        best = row or best
    best = best or {"note": "no batch that was tried trains"}
    return best | {"budget_bytes": known["memory_bytes"], "failed_batch": search.ruled_out}


def _trained(spec: ModelSpec, case: Case, memory: int, folder: Path) -> Row:
    """Measurements of a batch; nothing if it does not stay within the memory."""
    torch.compiler.reset()
    is_plain, network = case["method"] == LARGEST[0], Network(spec, case, folder)
    name = "" if is_plain else f"{name_of(case)}_{spec.batch_size}"
    try:  # costs of a roofline: to time the kernels of every batch would take longer than all trials
        module = network.planned(UNLIMITED if is_plain else memory, "roofline", name)
    except InvalidInput:  # no plan is that small
        return {}
    step = network.plain if is_plain else module
    peaks = network.peaks(step, module.plan)
    if peaks["measured_peak_bytes"] > memory:
        return {}
    times = spread([step_seconds(step, network.args, network.device) for _ in range(3)])
    return {"batch": spec.batch_size, "plan": name, **promises(module.plan, is_plain=is_plain), **peaks, **times}


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


def described(device: str) -> Row:
    """The device, the versions and the date, as rows have them."""
    name, known = "cpu", default_gpu(device).name
    if device == "cuda":
        name = torch.cuda.get_device_name()
        name = known if known.partition("_")[0] in name.lower().replace(" ", "") else "_".join(name.lower().split())
    return {"gpu": name, "date": datetime.date.today().isoformat(), **asdict(provenance())}


def groups(given: argparse.Namespace) -> Iterator[list[Case]]:
    """The cases of each process, those of the command line; what is worth the most first."""
    names = ("device", "size", "cost", "time_limit_s", "threads", "rounds")
    common = {name: getattr(given, name) for name in names} | {"costs_of": provenance_of(given.device)}
    networks = [{"model": model, "backend": backend} for backend in given.backends for model in given.models]
    for network in networks:
        budgets = [{"method": PLAIN}, *({"method": PLANNED, "share": share} for share in given.budgets)]
        yield [network | budget | common for budget in budgets]
    if given.device == "cpu" and not given.memory:
        return  # to fill the machine's memory would take a day
    for network, method in itertools.product(networks, LARGEST):
        yield [network | {"method": method, "memory_bytes": given.memory} | common]


def name_of(case: Case) -> str:
    """The name of a case's files."""
    return f"{_words(case).replace(' ', '_')}_{digest_of(case)[:8]}"


def _words(case: Case) -> str:
    return " ".join(str(case[key]) for key in ("model", "backend", "method", "share") if key in case)


def main(arguments: list[str] | None = None) -> int:
    """Measure what the folder lacks, or keep its rows and costs; returns the exit code."""
    given = _parser().parse_args(arguments)
    if given.keep:
        for path in keep(given):
            print(f"written {path}")
        return 0
    path, ends = given.folder / ROWS, math.inf if given.minutes is None else time.monotonic() + 60 * given.minutes
    asked, rows = list(groups(given)), [row for row in read_lines(path) if "error" not in row]
    write_lines(path, rows)  # what failed is tried again
    while left := list(filter(None, ([case for case in group if case not in _cases(rows)] for group in asked))):
        print(f"{sum(map(len, left))} of {sum(map(len, asked))} rows to measure", flush=True)
        try:
            error = _in_child(given.folder, left[0], ends - time.monotonic())
        except subprocess.TimeoutExpired:
            print("the time is up; the same command goes on from here")
            break
        rows = read_lines(path)
        if failed := [case for case in left[0] if case not in _cases(rows)]:
            rows.append({"case": failed[0], "error": error})
            write_lines(path, rows)
            print(line_of(rows[-1]), flush=True)
    return 0 if any("measured_s" in row for row in read_lines(path)) else 1


def _cases(rows: list[Row]) -> list[Case]:
    return [row["case"] for row in rows]


def _in_child(folder: Path, group: list[Case], limit_s: float) -> str:
    """Let another process measure cases; returns the error that ended it.

    Raises:
        subprocess.TimeoutExpired: the time was up.
    """
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            command("experiments.device", OWN_PROCESS, str(folder.resolve()), json.dumps(group)), stderr=errors,
            env=ALLOCATOR | environment({}, here=True),
        )  # fmt: skip
        try:
            child.wait(limit_s)
        finally:
            child.kill()
            child.wait()
        return last_line(errors) or f"its process ended with code {child.returncode}"


def measure(folder: Path, group: list[Case]) -> None:
    """Measure cases of one process, and write the row of each when it is finished."""
    begin_compiling(math.inf)
    first, path = group[0], folder / ROWS
    is_largest = first["method"] in LARGEST
    network = None if is_largest else Network(spec_at(first["model"], first["size"]), first, folder)
    for case in group:
        row, began = {"case": case, "load": round(os.getloadavg()[0], 2)}, time.monotonic()
        try:
            row |= described(case["device"]) | (network.row(case) if network else largest(case, folder))
        except RematError as error:
            row["error"] = " ".join(str(error).split())
        row["case_s"] = round(time.monotonic() - began, 3)
        write_lines(path, [*read_lines(path), row])
        print(line_of(row), flush=True)


def line_of(row: Row) -> str:
    """A row as a line of text."""
    texts = [text.format(row[key]) for key, text in SHOWN.items() if row.get(key)]
    return f"{_words(row['case'])}: {', '.join([*texts, *(['same bits'] if row.get('difference') == 0 else [])])}"


def keep(given: argparse.Namespace) -> Iterator[Path]:
    """Prove the plans, then write rows and measured costs below ``results/``; gives the files.

    Raises:
        InvalidInput: the folder has no rows, or a plan is not the one that its row promises.
    """
    from experiments.registry import Case  # here, because a device lacks what they import
    from experiments.store import KEPT_FOLDER, Table

    folder, path = given.folder, given.folder / ROWS
    rows = [row for row in read_lines(path) if "error" not in row]
    if not rows:
        raise InvalidInput(f"{folder} holds no rows: run python -m experiments.device {folder} on the device")
    for row in rows:
        if row.get("plan") and "bound" not in row:
            row |= proven(row, folder, given.time_limit_s, given.threads)
            write_lines(path, rows)
            print(line_of(row), flush=True)
    kept = Table("device", keep=True)
    for row in rows:
        what = {**row["case"], "gpu": row["gpu"]}
        kept.put(Case("experiments.device.measure", what), [{k: row[k] for k in row if k != "case"}], 0.0)
    yield kept.path
    measured = {row["gpu"]: {**row["case"], **row}["costs_of"] for row in rows if row["case"]["cost"] == "profile"}
    for gpu, provenance_of_costs in measured.items():
        yield store(folder / "costs", gpu, provenance_of_costs, KEPT_FOLDER)


def proven(row: Row, folder: Path, time_limit_s: float, threads: int) -> Row:
    """Bound and gap of a row's plan, and the cost of the cheapest one known, by the solvers of this machine.

    Of a compiled plan there is none: its cost is that of the code, which no graph has.
    """
    from experiments.measure_solve import solved  # here, because a device lacks the solvers

    files = files_of(folder, row["plan"])
    graph = load_graph(files[0])
    if not graph.total_cost:
        return {"bound": None, "gap": None}
    plan = Plan.load(files[1], graph)
    trace = simulate(graph, plan)
    if trace.peak_bytes != row["predicted_peak_bytes"]:
        raise InvalidInput(f"{files[1]}: its peak is {trace.peak_bytes} B, not {row['predicted_peak_bytes']} B")
    found = solved(
        graph, "portfolio", row["budget_bytes"], "free", time_limit_s=time_limit_s, threads=threads, warm_start=plan
    )
    gap = None if found.bound is None else relative_gap(trace.cost, found.bound)
    return {"plan_cost": trace.cost, "least_cost": found.cost, "bound": found.bound, "gap": gap,
            "proven_by": found.proven_by or None}  # fmt: skip


def _parser() -> Parser:
    def names(what: str, known: Iterable[str]) -> Callable[[str], list[str]]:
        return argument(lambda text: names_of(what, text, known))

    def name(what: str, known: Iterable[str]) -> Callable[[str], str]:
        return argument(lambda text: one_of(what, text, known))

    parser = Parser(prog="python -m experiments.device", description="measure planned steps on a device")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"of rows and costs (default: {FOLDER})")
    parser.add_argument("--keep", action="store_true",
                        help="measure nothing; prove the plans, and write rows and costs to results/")  # fmt: skip
    parser.add_argument("--minutes", type=seconds, help="measure no longer than this; run again to go on")
    parser.add_argument("--models", type=names("model", ON_A_GPU), default=MODELS, help=", ".join(ON_A_GPU))
    parser.add_argument("--backends", type=names("backend", BACKENDS), default=BACKENDS, help=", ".join(BACKENDS))
    parser.add_argument("--device", type=name("device", DEVICES), default="cuda", help="to measure on")
    parser.add_argument("--size", type=name("size", SIZES), default="gpu", help=", ".join(SIZES))
    parser.add_argument("--cost", type=name("cost model", COST_MODELS), default="profile", help=", ".join(COST_MODELS))
    parser.add_argument("--budgets", type=fractions, default=SHARES, help="shares of the plain peak, e.g. 0.8,0.6")
    parser.add_argument("--time-limit", type=seconds, default=10.0, dest="time_limit_s", help="seconds per plan")
    parser.add_argument("--threads", type=count, default=min(8, os.cpu_count() or 2), help="of a solver")
    parser.add_argument("--rounds", type=count, default=10, help="timed steps of each plan")
    parser.add_argument("--memory", type=argument(parse_size),
                        help="limit for the largest batches, e.g. 8GB; on CUDA what is free")  # fmt: skip
    return parser


if __name__ == "__main__":
    is_own = sys.argv[1:2] == [OWN_PROCESS]
    run(lambda: measure(Path(sys.argv[2]), json.loads(sys.argv[3])) if is_own else main())
