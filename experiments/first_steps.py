"""Seconds from the call of `rematerialize` to the end of the first step, and the overhead of later steps."""

import contextlib
import copy
import functools
import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from experiments.documents import Column, Drawing, made, table_of
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import planned, step_for_a_cpu
from experiments.steps.torch_runs import times_beside


@experiment(page="results/first-steps.md")
def first_steps(
    networks: Sequence[str] = ("gpt2", "llama", "resnet50", "unet", "vit"),
    layers: int = 12,
    budgets: Sequence[float] = (0.8, 0.6),
    time_limit_s: float = 60.0,
    threads: int = 2,
    rounds: int = 0,
    backends: Sequence[str] = ("eager",),
) -> Iterator[Case]:
    """Seconds from call to first step: an empty cache, a full one, another budget.

    Args:
        rounds: in each, the plain step and the planned one run, for the overhead in processor time.
        backends: of plans; the plain step of ``inductor`` is that of `torch.compile`.
    """
    for network, backend in itertools.product(networks, backends):
        what = {"network": network, "layers": layers, "budgets": list(budgets), "rounds": rounds}
        what |= {} if backend == "eager" else {"backend": backend}
        yield Case(measured, {**what, "time_limit_s": time_limit_s, "threads": threads}, on_this_machine=True)


def measured(
    network: str, layers: int, budgets: Sequence[float], time_limit_s: float, threads: int, rounds: int = 0,
    backend: str = "eager",
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for the plain step, and for each way to begin.

    With a full cache, the model is a copy, of which this process has captured nothing; a new process imports PyTorch
    besides. Inductor's cache is empty before its plain step, and again before its plans.
    """
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    options = {"n_layers": layers} if network in ("gpt2", "llama", "vit") else {}
    model, args = step_for_a_cpu(network, options)
    with _empty_cache(backend):
        modules: list[Any] = (
            [model] if backend == "eager" else [torch.compile(model), torch.compile(copy.deepcopy(model))]
        )
        for module, begins in zip(modules, ("the plain step", "the plain step, a full cache"), strict=False):
            _, row = _taken(lambda module=module: module, args)
            yield {"begins": begins, "backend": backend, **row}
    with tempfile.TemporaryDirectory() as folder, _empty_cache(backend):
        for begins, module, budget in (
            ("an empty cache", model, budgets[0]),
            *(("another budget", model, budget) for budget in budgets[1:]),
            ("a full cache", copy.deepcopy(model), budgets[0]),
        ):
            how = {"time_limit_s": time_limit_s, "threads": threads, "cache_folder": folder, "backend": backend}
            module.zero_grad()
            made, row = _taken(functools.partial(planned, module, args, budget, **how), args)
            plan = made.plan
            later = times_beside(modules[0], made, args, "cpu", rounds, time.process_time) if rounds else {}
            yield {
                "begins": begins, "backend": backend, "budget": budget, "calls": len(plan.graph),
                "overhead": plan.overhead, "phases": str(plan.phases), "recomputed": len(plan.recomputed),
                **row, **later,
            }  # fmt: skip


def _empty_cache(backend: str) -> AbstractContextManager[Any]:
    """An empty cache of Inductor, if that is the back-end."""
    if backend != "inductor":
        return contextlib.nullcontext()
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def _taken(call: Callable[[], Any], args: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
    """(the module that a call makes, seconds, and processor seconds with children's, of the call and of a step)."""
    times = [_clocks()]
    made = call()
    times.append(_clocks())
    made(*args).backward()
    times.append(_clocks())
    (call_s, call_cpu_s), (step_s, step_cpu_s) = (
        [after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(times)
    )
    return made, {"call_s": call_s, "call_cpu_s": call_cpu_s, "step_s": step_s, "step_cpu_s": step_cpu_s}


def _clocks() -> tuple[float, float]:
    used = os.times()
    return time.perf_counter(), used.user + used.system + used.children_user + used.children_system


def _measured(row: Row) -> str:
    if row.get("measured_ratio") is None:
        return ""
    low, high = (ratio - 1 for ratio in row["ratio_quartiles"])
    return f"{row['measured_ratio'] - 1:.1%} ({low:.1%} to {high:.1%}) of {1e3 * row['plain_s']:.1f} ms"


COLUMNS: Mapping[str, Column] = {
    "network": "{network}", "back-end": lambda row: row.get("backend") or "eager", "begins with": "{begins}",
    "budget": "{budget:g}", "calls": "{calls:.0f}",
    "call": lambda row: f"{row['call_s']:.1f} ({row['call_cpu_s']:.1f})" if row["phases"] else "",
    "first step": "{step_s:.1f} ({step_cpu_s:.1f})", "overhead": "{overhead:.2%}", "measured": _measured,
    "where": "{phases}",
}  # fmt: skip


@first_steps.draws
def table(rows: Sequence[Row]) -> Drawing:
    """A line for each network, back-end and way to begin."""
    where = made(rows, "torch", threads="threads")
    return Drawing(f"Seconds (processor seconds), {where}.\n\n{table_of(rows, COLUMNS, 'lllrrrrrrl')}")
