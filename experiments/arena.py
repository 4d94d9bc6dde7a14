"""Places for every byte: MiniMalloc's cases, plans of published graphs and of large models, beside other allocators."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import remat
from experiments.arguments import names_of
from experiments.documents import Drawing, markdown_table
from experiments.measure_solve import graph_of, published_folder
from experiments.registry import Case, Row, experiment
from experiments.steps.job import share_of_activations
from experiments.store import code_of
from remat.arena import compile_places, intervals_of, load_of, place, read_buffers, simulate_allocator
from remat.errors import InvalidInput
from remat.simulator import plain_peak

# [name] the graph of a large model, and the share of its activations that its plan may hold.
LARGE = {f"{name} {share:.0%}": (name, share) for name in ("llama_32", "llama_80") for share in (0.5, 0.35)}
# Files whose upper ends are inclusive.
INCLUSIVE = ("pangu_2.6B",)
SOLVE_S = 30.0
PLACES = "2"  # the version of the searches for places: raise it when they may find others


@experiment(page="results/arena.md")
def arena(
    sets: Sequence[str] = ("minimalloc", "zoo", "large", "somas"), seeds: int = 5,
    allocators: Sequence[str] = ("remat", "cp_sat", "torch_simulated", "torch_expandable_simulated"),
    limit: float = 10.0, large_limit: float = 20.0,
) -> Iterator[Case]:  # fmt: skip
    """Arena / load and processor seconds, beside CP-SAT and PyTorch's allocator, simulated."""
    for kind in names_of("set", sets, CASES):
        for name in CASES[kind]():
            for allocator in names_of("allocator", allocators, ALLOCATORS):
                for seed in range(seeds if kind == "minimalloc" and allocator == "remat" else 1):
                    what = {"set": kind, "name": name, "allocator": allocator, "seed": seed}
                    seconds = large_limit if kind == "large" else limit
                    code = [*code_of("portfolio"), *([PLACES] if allocator == "remat" else [])]
                    yield Case(measured, what | {"limit_s": seconds}, code, on_this_machine=True)


def _folder() -> Path:
    return published_folder("arena") / "arena"


CASES: dict[str, Callable[[], list[str]]] = {
    "minimalloc": lambda: sorted(path.name for path in _folder().glob("*.csv")),
    "zoo": lambda: list(remat.zoo.names("graph")),
    "large": lambda: list(LARGE),
    "somas": lambda: sorted(path.name for path in _folder().glob("*.csv.gz")),
}


class Buffers(NamedTuple):
    """Buffers to place: when they begin and end, their bytes, and the bytes that there are; None for any number."""

    lower: np.ndarray
    upper: np.ndarray
    size: np.ndarray
    capacity: int | None


Found = tuple[int | None, bool]  # the block's bytes, whether they are proven the least


def buffers(kind: str, name: str) -> Buffers:
    """The buffers of a case."""
    if kind in ("minimalloc", "somas"):
        _, lower, upper, size = read_buffers(_folder() / name, is_inclusive=name.startswith(INCLUSIVE))
        return Buffers(lower, upper, size, int(name.split(".")[-2]) if kind == "minimalloc" else None)
    graph, plan = (remat.zoo.graph(name), remat.zoo.load(name)) if kind == "zoo" else _large_plan(name)
    found = intervals_of(graph, plan)
    return Buffers(found.lower, found.upper, found.size, None)


def _large_plan(name: str) -> tuple[remat.Graph, remat.Plan]:
    model, share = LARGE[name]
    graph = graph_of(f"results/graphs/{model}.json.gz")
    budget_bytes = share_of_activations(share, graph.fixed_bytes, plain_peak(graph))
    solution = remat.solve(graph, budget_bytes, time_limit_s=SOLVE_S, threads=1)
    if solution.plan is None:
        raise InvalidInput(f"{name}: {solution.message}")
    return graph, solution.plan


def measured(set: str, name: str, allocator: str, seed: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """A row: the block, the load, whether the block is proven the smallest, and processor seconds without compiling."""
    of = buffers(set, name)
    if allocator == "remat":
        compile_places()
    load = load_of(of.lower, of.upper, of.size)
    began = time.process_time()
    n_bytes, is_optimal = ALLOCATORS[allocator](of, limit_s, seed)
    yield {
        "n_buffers": len(of.size), "load": load, "capacity": of.capacity, "bytes": n_bytes, "is_optimal": is_optimal,
        "cpu_s": time.process_time() - began,
    }  # fmt: skip


def _remat(of: Buffers, limit_s: float, seed: int) -> Found:
    placed = place(*of, limit_s, seed=seed)
    return placed.bytes, placed.is_optimal


def _cp_sat(of: Buffers, limit_s: float, seed: int) -> Found:
    """`no_overlap_2d`, one worker, in units of the greatest common divisor."""
    from ortools.sat.python import cp_model

    lower, upper, size, capacity = of
    model, unit = cp_model.CpModel(), max(1, int(np.gcd.reduce(size)))
    most = int(size.sum()) // unit if capacity is None else capacity // unit
    tops, across, along = [], [], []
    for low, high, each in zip(lower.tolist(), upper.tolist(), (size // unit).tolist(), strict=True):
        start = model.new_int_var(0, max(0, most - each), "")
        along.append(model.new_fixed_size_interval_var(start, each, ""))
        across.append(model.new_fixed_size_interval_var(low, high - low, ""))
        tops.append(start + each)
    model.add_no_overlap_2d(across, along)
    block = model.new_int_var(0, most, "")
    model.add_max_equality(block, tops)
    if capacity is None:
        model.minimize(block)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers, solver.parameters.random_seed = 1, seed
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    is_found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return solver.value(block) * unit if is_found else None, status == cp_model.OPTIMAL


def _omnimalloc(of: Buffers, limit_s: float, seed: int) -> Found:
    """The branch and bound of omnimalloc 1.0.0, one thread; it takes no capacity."""
    try:
        omnimalloc = import_module("omnimalloc.allocators")
        buffer = import_module("omnimalloc").Allocation
    except ImportError:
        raise InvalidInput("omnimalloc is not installed: pip install omnimalloc==1.0.0") from None
    rows = zip(of.size.tolist(), of.lower.tolist(), of.upper.tolist(), strict=True)
    buffers = tuple(buffer(i, *row) for i, row in enumerate(rows) if row[0])
    found = omnimalloc.SupermallocAllocator(limit_s, num_threads=1).solve(buffers)
    return found.peak, found.proved_optimal


def _simulated(of: Buffers, limit_s: float, seed: int, *, is_expandable: bool) -> Found:
    """The smallest limit that three steps of PyTorch's allocator survive, as simulated."""
    return simulate_allocator(of.lower, of.upper, of.size, is_expandable=is_expandable).limit_bytes, False


ALLOCATORS = {
    "remat": _remat,
    "cp_sat": _cp_sat,
    "omnimalloc": _omnimalloc,
    "torch_simulated": partial(_simulated, is_expandable=False),
    "torch_expandable_simulated": partial(_simulated, is_expandable=True),
}


@arena.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each set and allocator: how many reach their goal, median and worst ratio to it, processor seconds."""
    lines, sets, allocators = [], [*CASES], [*ALLOCATORS]
    pairs = {(row["set"], row["allocator"]) for row in rows}
    for kind, allocator in sorted(pairs, key=lambda pair: (sets.index(pair[0]), allocators.index(pair[1]))):
        own = [row for row in rows if (row["set"], row["allocator"]) == (kind, allocator)]
        seeds = sorted({row["seed"] for row in own})
        found = [row for row in own if row["bytes"] is not None]
        ratios = [row["bytes"] / (row["capacity"] or row["load"]) for row in found]
        reached = sum(ratio <= 1 for ratio in ratios)
        by_seed = [sum(row["cpu_s"] for row in own if row["seed"] == seed) for seed in seeds]
        lines.append([
            kind, allocator, str(len(own)), f"{reached}", f"{np.median(ratios):.4f}" if found else "-",
            f"{max(ratios):.4f}" if len(found) == len(own) else "-",
            f"{min(by_seed):.1f} to {max(by_seed):.1f}" if len(seeds) > 1 else f"{by_seed[0]:.1f}",
        ])  # fmt: skip
    goal = "within capacity or at the load"
    heads = ["cases", "allocator", "runs", goal, "median / that", "worst / that", "processor s for all"]
    return Drawing(markdown_table(heads, lines, "llrrrrr"))
