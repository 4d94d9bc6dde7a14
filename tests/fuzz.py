"""Random cases far beyond the few of CI: what `make fuzz` runs.

A campaign is a module of this folder with a function ``check(seed) -> str`` that makes one random case from its seed
and returns an outcome: ``ok``, ``ok: 3 WHAT, 1 WHAT`` (how often it checked what; the campaign adds these up),
``refused: WHY`` (remat declined in one line, which is allowed), or anything else, e.g. ``different: WHAT`` or ``over
budget: WHAT``, which is a defect. The seed alone repeats a case:
``python tests/fuzz.py modules --seeds 17``.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import importlib
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

CAMPAIGNS = {
    "modules": "random_modules", "graphs": "random_graphs", "certificates": "forged_certificates",
    "bounds": "random_bounds",
}  # fmt: skip
CASES = {"modules": 300, "graphs": 3000, "certificates": 3000, "bounds": 1000}
ALLOWED = ("ok", "refused")


def main() -> int:
    """Run campaigns; returns 1 if a case found a defect."""
    options = _options()
    names = options.campaigns or list(CAMPAIGNS)
    failed = False
    for name in names:
        deadline = time.monotonic() + options.seconds / len(names) if options.seconds else None
        seeds = options.seeds or range(options.first, options.first + (options.cases or CASES[name]))
        failed |= _campaign(name, list(seeds), options.jobs, deadline)
    return int(failed)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make fuzz", description="Random cases; prints counts and the seeds of defects."
    )
    parser.add_argument("campaigns", nargs="*", choices=[[], *CAMPAIGNS], help="by default all")
    parser.add_argument(
        "--cases", type=int, help="of each campaign; by default 300 modules, 1000 bounds, 3000 of the others"
    )
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, nargs="+", help="these seeds alone")
    parser.add_argument("--seconds", type=float, help="end after this time, shared equally by the campaigns")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    return parser.parse_args()


def _campaign(name: str, seeds: list[int], jobs: int, deadline: float | None) -> bool:
    counts, checks = collections.Counter[str](), collections.Counter[str]()
    defects, start = list[str](), time.monotonic()
    try:
        for seed, outcome in _outcomes(name, seeds, jobs, deadline):
            kind = outcome.partition(":")[0]
            counts[outcome if kind == "refused" else kind] += 1
            if kind == "ok":
                checks.update(checks_of(outcome))
            if kind not in ALLOWED:
                defects.append(f"  seed {seed}: {outcome}")
                print(defects[-1], flush=True)
    finally:  # an interrupted campaign says how far it came
        print(f"{name}: {counts.total()} tried in {time.monotonic() - start:.0f} s, {len(defects)} defects")
        for outcome, n in counts.most_common():
            print(f"  {n:6} {outcome}", flush=True)
        for what, n in sorted(checks.items()):
            print(f"  {n:9} {what}", flush=True)
    return bool(defects)


def checks_of(outcome: str) -> dict[str, int]:
    """[what was checked] how often, of an outcome ``ok: 3 WHAT, 1 WHAT``."""
    checks = [check.partition(" ") for check in outcome.removeprefix("ok").removeprefix(": ").split(", ") if check]
    return {what: int(count) for count, _, what in checks}


def _outcomes(name: str, seeds: list[int], jobs: int, deadline: float | None) -> Iterator[tuple[int, str]]:
    """(seed, outcome) as cases end; none begins after the deadline."""
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=spawned, max_tasks_per_child=50) as pool:
        waiting, todo = dict[concurrent.futures.Future[str], int](), iter(seeds)
        while True:
            while len(waiting) < 2 * jobs and (deadline is None or time.monotonic() < deadline):
                seed = next(todo, None)
                if seed is None:
                    break
                waiting[pool.submit(outcome_of, name, seed)] = seed
            if not waiting:
                return
            done, _ = concurrent.futures.wait(waiting, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in done:
                yield waiting.pop(future), future.result()


def outcome_of(name: str, seed: int, **options: Any) -> str:
    """The outcome of one case; an exception is one too. `options` are further arguments of `check`."""
    try:
        return importlib.import_module(CAMPAIGNS[name]).check(seed, **options)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = (str(error).strip().splitlines() or [""])[0][:200]
        return f"crashed: {type(error).__name__}: {text} ({last.filename.rpartition('/')[2]}:{last.lineno})"


if __name__ == "__main__":
    sys.exit(main())
