"""``make large``: how fast large steps are captured and planned, and how good the plan is after 10, 60 and 600 s.

Llama steps in bfloat16 on an H100's roofline: 32, 48 and 80 layers, dense and with eight experts; GPT-2 XL's 48 layers
in float32. Budgets lie between the smallest that is known to suffice and the plain peak. Finished solves are kept, so
that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import remat
from experiments.arguments import Parser, names_of, run
from experiments.documents import DOCS, ROOT, Document, Drawing, markdown_table
from experiments.provenance import of_torch
from experiments.solving import finished
from experiments.store import code_of, write_json
from remat.cost import apply_cost, load_gpu
from remat.errors import InvalidInput
from remat.files import read_json
from remat.frontends.spec import ModelSpec
from remat.search.__main__ import main as compile_search
from remat.simulator import plain_peak
from remat.units import format_size

RESULTS = ROOT / "results" / "large.json"
LLAMA, GPT2 = "remat.torch.networks.llama:llama", "remat.torch.networks.transformer:gpt2"
LIMITS = (10, 60, 600)  # seconds
SHARES = (0.75, 0.5, 0.25)  # of the way from the smallest budget to the plain peak
THREADS, STRATEGY = 2, "portfolio"
SMALL = {"width": 4096, "hidden": 11_008, "n_heads": 32}
LARGE = {"width": 8192, "hidden": 28_672, "n_heads": 64, "n_groups": 8}
STEPS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{kind}{layers}": (LLAMA, {"length": 4096, "dtype": "bfloat16", "n_layers": layers, **widths, **more})
    for kind, more in (("dense", {}), ("experts", {"n_experts": 8}))
    for layers, widths in ((32, SMALL), (48, LARGE), (80, LARGE))
} | {"gpt48": (GPT2, {"length": 1024, "width": 1600, "n_layers": 48, "n_heads": 25})}


def capture(name: str) -> tuple[remat.Graph, dict[str, Any]]:
    """(the step's graph without costs, how long a process took to make it, and its largest resident set)."""
    target, options = STEPS[name]
    spec = ModelSpec(name, "torch", target, batch_size=4, options=dict(options))
    with tempfile.TemporaryDirectory() as folder:
        spec_file, out = Path(folder, "spec.json"), Path(folder, "graph.json")
        spec_file.write_text(spec.to_json())
        began = time.monotonic()
        child = subprocess.Popen([sys.executable, "-m", "remat._extract", str(spec_file), str(out)])
        _, status, usage = os.wait4(child.pid, 0)
        took_s = time.monotonic() - began
        if status:
            raise InvalidInput(f"{name} was not captured: exit code {os.waitstatus_to_exitcode(status)}")
        return remat.load_graph(out), {"capture_s": round(took_s, 1), "capture_bytes": usage.ru_maxrss * 1024}


def facts_of(name: str) -> tuple[remat.Graph, dict[str, Any]]:
    """(the graph with costs, what is known of it)."""
    graph, facts = capture(name)
    graph = apply_cost(graph, "roofline", load_gpu("h100"))
    least = remat.min_budget(graph, time_limit_s=20.0).bytes
    return graph, facts | {"operations": len(graph), "plain_bytes": plain_peak(graph), "least_bytes": least}


def solved(graph: remat.Graph, budget_bytes: int, limit_s: int) -> dict[str, Any]:
    """The result of the portfolio, in a process of its own so that its memory is known."""
    (found,) = remat.solve_sweep(graph, [budget_bytes], STRATEGY, time_limit_s=limit_s, threads=THREADS, isolate=True)
    finished(found)
    return {
        "code": code_of(STRATEGY), "budget_bytes": budget_bytes, "limit_s": limit_s, "overhead": found.overhead,
        "gap": found.gap, "status": str(found.status), "solver_bytes": found.solver_memory_bytes,
    }  # fmt: skip


def draw(arguments: Sequence[str]) -> Drawing:
    """The tables of the page, from the stored results of ``make large``."""
    stored = read_json(RESULTS)
    heads = ["step", "operations", "capture", "memory of capture", "memory of the planner", "smallest budget", "plain"]
    graphs = markdown_table(heads, [_graph(name, step) for name, step in stored["steps"].items()])
    limits = [f"{limit} s" for limit in LIMITS]
    plans = markdown_table(
        ["step", "budget", *(f"overhead after {x}" for x in limits), "gap", "cost after 10 s / best"],
        [row for name, step in stored["steps"].items() for row in _plans(name, step)],
    )
    where = f"{stored['date']}, PyTorch {stored['torch']}, {stored['cpu']}, {THREADS} threads."
    return Drawing(f"{where}\n\n{graphs}\n\n{plans}")


def _graph(name: str, step: Mapping[str, Any]) -> list[str]:
    solver = max((row["solver_bytes"] for row in step["solves"]), default=0)
    return [
        name, f"{step['operations']:,}", f"{step['capture_s']:.0f} s", format_size(step["capture_bytes"], digits=0),
        format_size(solver, digits=0), format_size(step["least_bytes"]), format_size(step["plain_bytes"]),
    ]  # fmt: skip


def _plans(name: str, step: Mapping[str, Any]) -> list[list[str]]:
    rows = list[list[str]]()
    for budget_bytes in dict.fromkeys(row["budget_bytes"] for row in step["solves"]):
        of = {row["limit_s"]: row for row in step["solves"] if row["budget_bytes"] == budget_bytes}
        planned = [row for row in of.values() if row["overhead"] is not None]
        cells = [_percent(of[limit]["overhead"]) if limit in of else "" for limit in LIMITS]
        gap = min((row["gap"] for row in planned if row["gap"] is not None), default=None)
        best, first = min((row["overhead"] for row in planned), default=None), of.get(LIMITS[0], {}).get("overhead")
        ratio = "" if best is None or first is None or len(of) < 2 else f"{(1 + first) / (1 + best):.4f}"
        rows.append([name, format_size(budget_bytes), *cells, _percent(gap), ratio])
    return rows


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.2%}"


DOCUMENT = Document("large", DOCS / "results" / "large.md", draw)


def main(arguments: list[str] | None = None) -> None:
    """Write the file of results, and print its rows."""
    parser = Parser(prog="python -m experiments.large", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--steps", default=",".join(STEPS), help=f"comma-separated, of {', '.join(STEPS)}")
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)), help="comma-separated seconds")
    parser.add_argument("--again", action="store_true", help="measure finished steps too")
    chosen = parser.parse_args(arguments)
    limits = [int(text) for text in names_of("limit", chosen.limits, map(str, LIMITS))]
    stored: dict[str, Any] = read_json(RESULTS) if RESULTS.is_file() else {"steps": {}}
    compile_search()
    for name in names_of("step", chosen.steps, STEPS):
        known = stored["steps"].get(name, {})
        done = {(row["budget_bytes"], row["limit_s"]) for row in known.get("solves", [])
                if row.get("code") == code_of(STRATEGY) and not chosen.again}  # fmt: skip
        if all(sum(own == limit for _, own in done) == len(SHARES) for limit in limits):
            print(f"{name}: measured before, in {RESULTS}")
            continue
        graph, facts = facts_of(name)
        print(json.dumps({"step": name, **facts}), flush=True)
        least = known.get("least_bytes", facts["least_bytes"])  # so that the budgets stay the same
        wanted = [round(least + share * (facts["plain_bytes"] - least)) for share in SHARES]
        solves = {(row["limit_s"], wanted.index(row["budget_bytes"])): row for row in known.get("solves", [])
                  if row["budget_bytes"] in wanted}  # fmt: skip
        for limit in limits:
            for i, budget_bytes in enumerate(wanted):
                if (budget_bytes, limit) not in done:
                    row = solves[limit, i] = solved(graph, budget_bytes, limit)
                    print(json.dumps({"step": name, **row}), flush=True)
                    in_order = [solves[key] for key in sorted(solves)]
                    stored["steps"][name] = facts | {"least_bytes": least, "solves": in_order}
                    stored |= of_torch()
                    write_json(RESULTS, stored)


if __name__ == "__main__":
    run(main)
