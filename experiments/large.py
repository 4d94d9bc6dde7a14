"""How fast large steps are captured and planned, see docs/results/large.md."""

import resource
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import remat
from experiments.arguments import one_of
from experiments.documents import Column, Drawing, grouped, made, markdown_table, table_of
from experiments.measure_solve import solved
from experiments.registry import Case, Row, experiment
from experiments.store import Table, code_of
from remat.cost import apply_cost, load_gpu
from remat.extraction import extract_in_child
from remat.frontends.spec import ModelSpec
from remat.simulator import plain_peak
from remat.units import format_size

LLAMA, GPT2 = "remat.torch.networks.llama:llama", "remat.torch.networks.transformer:gpt2"
SHARES = (0.75, 0.5, 0.25)  # of the way from the smallest budget to the plain peak
THREADS, STRATEGY = 2, "portfolio"
SMALL = {"width": 4096, "hidden": 11_008, "n_heads": 32}
LARGE = {"width": 8192, "hidden": 28_672, "n_heads": 64, "n_groups": 8}
STEPS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    f"{kind}{layers}": (LLAMA, {"length": 4096, "dtype": "bfloat16", "n_layers": layers, **widths, **more})
    for kind, more in (("dense", {}), ("experts", {"n_experts": 8}))
    for layers, widths in ((32, SMALL), (48, LARGE), (80, LARGE))
} | {"gpt48": (GPT2, {"length": 1024, "width": 1600, "n_layers": 48, "n_heads": 25})}


@experiment(page="results/large.md")
def large(
    steps: Sequence[str] = ("dense32", "dense48", "dense80", "experts32", "experts48", "experts80", "gpt48"),
    limits: Sequence[int] = (10, 60, 600),
) -> Iterator[Case]:
    """Steps of 32 to 80 layers: capture, memory, overhead after 10, 60 and 600 s (hours)."""
    for step in steps:
        for limit in limits:
            what = {"step": one_of("step", step, STEPS), "limit_s": limit}
            yield Case(measured, what, code_of(STRATEGY), on_this_machine=True)


def measured(step: str, limit_s: int) -> Iterator[dict[str, Any]]:
    """A row for each budget. Budgets lie above the smallest one that earlier rows know, so that they stay the same."""
    graph, facts = capture(step)
    graph = apply_cost(graph, "roofline", load_gpu("h100"))
    plain_bytes = plain_peak(graph)
    known = [row["least_bytes"] for row in Table("large").rows() if row["step"] == step]
    least = known[0] if known else remat.min_budget(graph, time_limit_s=20.0).bytes
    facts |= {"operations": len(graph), "plain_bytes": plain_bytes, "least_bytes": least}
    for share in SHARES:
        budget = round(least + share * (plain_bytes - least))
        found = solved(graph, STRATEGY, budget, "staged", time_limit_s=limit_s, threads=THREADS)
        yield facts | {
            "budget_bytes": budget, "overhead": found.overhead, "gap": found.gap, "status": str(found.status),
            "solver_bytes": found.solver_memory_bytes,
        }  # fmt: skip


def capture(name: str) -> tuple[remat.Graph, dict[str, Any]]:
    """(the step's graph without costs, how long a process took to make it, and its largest resident set)."""
    target, options = STEPS[name]
    began = time.monotonic()
    graph = extract_in_child(ModelSpec(name, "torch", target, batch_size=4, options=dict(options)), None)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)  # the first child: a case is a process
    return graph, {"capture_s": round(time.monotonic() - began, 1), "capture_bytes": used.ru_maxrss * 1024}


GRAPHS: Mapping[str, Column] = {
    "step": "{step}", "operations": "{operations:,}", "capture": "{capture_s:.0f} s",
    "memory of capture": lambda row: format_size(row["capture_bytes"], digits=0),
    "memory of the planner": lambda row: format_size(row["solver_bytes"], digits=0),
    "smallest budget": lambda row: format_size(row["least_bytes"]),
    "plain": lambda row: format_size(row["plain_bytes"]),
}  # fmt: skip


@large.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each step, and one for each budget."""
    of = grouped(rows, itemgetter("step"))
    solver_bytes = {step: max(row["solver_bytes"] or 0 for row in own) for step, own in of.items()}
    graphs = table_of([{**own[0], "solver_bytes": solver_bytes[step]} for step, own in of.items()], GRAPHS)
    limits = sorted({row["limit_s"] for row in rows})
    plans = markdown_table(
        ["step", "budget", *(f"overhead after {x} s" for x in limits), "gap", f"cost after {limits[0]} s / best"],
        [line for name, own in of.items() for line in _plans(name, own, limits)],
    )
    return Drawing(f"{made(rows, 'torch')}, {THREADS} threads.\n\n{graphs}\n\n{plans}")


def _plans(name: str, rows: Sequence[Row], limits: Sequence[int]) -> Iterator[list[str]]:
    for budget_bytes in sorted({row["budget_bytes"] for row in rows}, reverse=True):
        of = {row["limit_s"]: row for row in rows if row["budget_bytes"] == budget_bytes}
        overheads = [row["overhead"] for row in of.values() if row["overhead"] is not None]
        gap = min((row["gap"] for row in of.values() if row["gap"] is not None and row["overhead"] is not None),
                  default=None)  # fmt: skip
        first = of[limits[0]]["overhead"] if limits[0] in of else None
        ratio = "" if first is None or len(of) < 2 else f"{(1 + first) / (1 + min(overheads)):.4f}"
        cells = [_percent(of[limit]["overhead"]) if limit in of else "" for limit in limits]
        yield [name, format_size(budget_bytes), *cells, _percent(gap), ratio]


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{share:.2%}"
