"""``python -m experiments.device capture|plan|execute|all FOLDER``, see `experiments.device`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from experiments.arguments import Parser, argument, count, fractions, names, one_name, run, seconds
from experiments.device import processes
from experiments.device.folder import BATCHES, CAPTURE, EXECUTE, Case, Folder, Row
from experiments.device.models import BACKENDS, MODELS, SIZES
from experiments.device.table import table, write_results
from remat.cost import COST_MODELS
from remat.cost.profile import DEVICES
from remat.cost.stored import RESULTS_FOLDER, store
from remat.units import parse_size

COMMANDS = ("capture", "plan", "execute", "all")
FOLDER = Path("runs/device")
SHARES = [0.8, 0.6, 0.45, 0.3]  # of the plain step's peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the commands, or all three."""
    given = _parser().parse_intermixed_args(arguments)  # the folder may follow options
    folder = Folder(given.folder)
    todo = {"capture": [_capture], "plan": [_plan], "execute": [_execute], "all": [_capture, _plan, _execute]}
    try:
        return max([command(folder, given) for command in todo[given.command]])
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", flush=True)
        os._exit(130)  # at once: solves in threads would go on to their limit; their processes end with this one


def _parser() -> Parser:
    parser = Parser(prog="python -m experiments.device", description="measure a device, in three commands")
    parser.add_argument("command", type=one_name("command", lambda: COMMANDS), help=", ".join(COMMANDS))
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"handed on (default: {FOLDER})")
    parser.add_argument("--models", type=names("model", lambda: MODELS), default=[*MODELS], help=", ".join(MODELS))
    parser.add_argument("--backends", type=names("backend", lambda: BACKENDS), default=[*BACKENDS],
                        help=", ".join(BACKENDS))  # fmt: skip
    parser.add_argument("--device", type=one_name("device", lambda: DEVICES), default="cuda", help="to capture on")
    parser.add_argument("--size", type=one_name("size", lambda: SIZES), default="gpu", help=", ".join(SIZES))
    parser.add_argument("--cost", type=one_name("cost model", lambda: COST_MODELS), default="profile",
                        help=f"of operations: {', '.join(COST_MODELS)}")  # fmt: skip
    parser.add_argument("--minutes", type=seconds, help="no longer than this on the device; run again to go on")
    parser.add_argument("--budgets", type=fractions, default=SHARES, help="shares of the plain peak, e.g. 0.8,0.6")
    parser.add_argument("--time-limit", type=seconds, default=60.0, help="seconds per plan")
    parser.add_argument("--threads", type=count, default=2, help="of a solver")
    parser.add_argument("--jobs", type=count, default=max(1, (os.cpu_count() or 2) // 2), help="plans at once")
    parser.add_argument("--rounds", type=count, default=10, help="timed steps of each plan")
    parser.add_argument("--memory", type=argument(parse_size),
                        help="limit for the largest batches, e.g. 8GB; on CUDA what is free")  # fmt: skip
    parser.add_argument("--tries", type=count, default=6, help="batches to try for each largest one")
    parser.add_argument("--out", type=Path, default=RESULTS_FOLDER, help="folder of the devices' folders")
    return parser


def _capture(folder: Folder, given: argparse.Namespace) -> int:
    folder.describe(processes.describe(given.device, given.size))
    cases = [case for case in folder.cases(given.models, given.backends) if case.captured() is None]
    if cases:
        print(f"{len(cases)} captures; how long they take is known after the first one")

    job = {"work": CAPTURE, "folder": str(folder.path.resolve()), "device": given.device, "size": given.size,
           "cost": given.cost}  # fmt: skip
    processes.run(
        cases, processes.Clock(given.minutes), CAPTURE, lambda case: job | _of(case), lambda case: 1,
        lambda case, error: case.add(Row(CAPTURE, error=error)),
    )  # fmt: skip
    for case in folder.captured(given.models, given.backends):
        case.drop(CAPTURE)
    print(f"captured into {folder.path}; next, where a solver is: python -m experiments.device plan {folder.path}")
    return 0


def _of(case: Case) -> dict[str, Any]:
    return {"model": case.model, "backend": case.backend}


def _plan(folder: Folder, given: argparse.Namespace) -> int:
    from experiments.device.plan import plan

    cases = folder.captured(given.models, given.backends)
    shares = [f"{share:g}" for share in given.budgets]
    for line in plan(cases, shares, given.time_limit, given.threads, given.jobs):
        print(line, flush=True)
    if any((case.captured() or {})["cost"] == "profile" for case in cases):
        device = folder.device()
        print(f"measured costs: {store(folder.costs, device['gpu'], device['provenance'], given.out)}")
    print(f"planned; next, on the device: python -m experiments.device execute {folder.path}")
    return 0


def _execute(folder: Folder, given: argparse.Namespace) -> int:
    cases = folder.captured(given.models, given.backends)
    known = folder.device()
    folder.check(processes.describe(known["device"], known["size"]))
    clock, name, written = processes.Clock(given.minutes), datetime.now().isoformat(timespec="seconds"), []
    job = {
        "folder": str(folder.path.resolve()), "device": known["device"], "size": known["size"],
        "rounds": given.rounds, "memory_bytes": given.memory, "tries": given.tries, "run": name,
    }  # fmt: skip
    works = [EXECUTE, BATCHES]
    if known["device"] == "cpu" and not given.memory:
        works = [EXECUTE]  # to fill the machine's memory would take a day
    todo = {work: [case for case in cases if case.missing(work, name)] for work in works}
    took = sum((case.captured() or {})["seconds"] for of_work in todo.values() for case in of_work)
    print(f"{sum(map(len, todo.values()))} parts; about {took / 60:.1f} minutes, if each takes as long as its capture")
    for work, of_work in todo.items():
        for case in of_work:
            case.drop(work)
        finished = processes.run(
            of_work, clock, work, lambda case, work=work: job | _of(case) | {"work": work},
            lambda case, work=work: len(case.missing(work, name)),
            lambda case, error, work=work: case.add(Row(work, error=error)),
        )  # fmt: skip
        written = write_results(folder, folder.cases(given.models, given.backends), given.out)
        if not finished:
            break
    print(table(folder.cases(given.models, given.backends)))
    print("\n".join(f"written {path}" for path in written))
    return 0 if any(row.measured_s for case in cases for row in case.rows()) else 1


if __name__ == "__main__":
    run(main)
