"""The best checkpoints in PyTorch's own languages beside the free plan, see docs/results/checkpoints.md."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import remat.torch as rt
from experiments.documents import Drawing, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import Beside, planned, promise_of, step_for_a_cpu
from experiments.table import made, values_of
from remat.errors import InvalidInput
from remat.torch.planning.planner import there_before
from remat.units import format_size

LANGUAGES = ("blocks", "selective")
VARIANTS = (*LANGUAGES, "free")


@experiment(page="results/checkpoints.md")
def checkpoints(
    models: Sequence[str] = ("gpt2", "llama", "vit", "resnet50", "unet"), shares: Sequence[float] = (0.85, 0.7, 0.55),
    rounds: int = 11, time_limit_s: float = 20.0, threads: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """The best checkpoints in PyTorch's own languages beside the free plan, within the same budgets."""
    for model in models:
        for share in shares:
            what = {"model": model, "share": share, "rounds": rounds, "time_limit_s": time_limit_s, "threads": threads}
            yield Case(measured, what, on_this_machine=True)


def measured(model: str, share: float, rounds: int, time_limit_s: float, threads: int) -> Iterator[dict[str, Any]]:
    """A row for each variant; one that does not fit has a message only."""
    torch.set_num_threads(threads)
    plain, args = step_for_a_cpu(model)
    try:
        free = planned(plain, args, share, time_limit_s=time_limit_s)
    except InvalidInput as error:
        yield {"variant": "free", "message": str(error)}
        return
    beside, before, promise = Beside(plain, args), there_before(free.plan), promise_of(free.plan)
    beside.add(free, {"variant": "free", **promise}, before)
    for language in LANGUAGES:
        try:
            found = rt.checkpoints(free, args, language=language)
        except InvalidInput as error:
            yield {"variant": language, "message": str(error)}
            continue
        own = copy.deepcopy(plain, {id(x): x for x in (*plain.parameters(), *plain.buffers())})
        row = {"budget_bytes": promise["budget_bytes"], "predicted_bytes": found.peak_bytes, "overhead": found.overhead}
        beside.add(found.apply(own), {"variant": language, **row}, before)
    yield from beside.timed(rounds)


@checkpoints.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each network and budget."""
    of = {(row["model"], row["share"], row["variant"]): row for row in rows}
    table = markdown_table(
        ["network", "budget", *(f"{variant}: overhead, measured" for variant in VARIANTS)],
        [[name, f"{share:g}", *(_cell(of.get((name, share, variant))) for variant in VARIANTS)]
         for name, share in dict.fromkeys((row["model"], row["share"]) for row in rows)],
    )  # fmt: skip
    executed = [row for row in rows if row["measured_bytes"] is not None]
    over = max(row["measured_bytes"] - row["predicted_bytes"] for row in executed)
    differing = sum(row["difference"] != 0 for row in executed)
    facts = (
        f"{made(rows, 'torch')}, {values_of(rows, 'threads')} threads, {values_of(rows, 'rounds')} paired rounds, "
        f"{values_of(rows, 'time_limit_s')} s of search. Of {len(executed)} executed steps, {differing} differ from "
        f"the plain one in a bit; the largest measured peak above its promise: {format_size(max(0, over), digits=3)}."
    )
    return Drawing(f"{facts}\n\n{table}")


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["overhead"] is None:
        return "does not fit"
    low, middle, high = statistics.quantiles(row["ratios"], n=4)
    return f"{row['overhead']:.1%}, {middle - 1:.1%} ({low - 1:.1%} to {high - 1:.1%})"
