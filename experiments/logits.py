"""The longest sequences of Llama-like steps with a vocabulary of 128k, with the logits in chunks and without.

See docs/results/explain.md.
"""

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import remat.torch as rt
from experiments.documents import Column, Drawing, made, table_of
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import Beside, planned, promise_of
from experiments.steps.torch_runs import times_beside
from remat.frontends.spec import load_target
from remat.torch.measuring.measure import peak_of_step
from remat.torch.planning.planner import there_before

LLAMA = "remat.torch.networks.llama:llama"
VOCABULARY = 128_256
ON_A_GPU: Mapping[str, dict[str, Any]] = {
    "Llama 3.2 1B": {"width": 2048, "hidden": 8192, "n_layers": 16, "n_heads": 32, "n_groups": 8},
    "Llama 3.1 8B": {"width": 4096, "hidden": 14_336, "n_layers": 32, "n_heads": 32, "n_groups": 8},
}
SMALL = {"batch_size": 1, "width": 256, "hidden": 1024, "n_layers": 8, "n_heads": 8, "vocabulary": VOCABULARY}
CPU_BUDGET, OVERHEAD = "680MB", 0.05
LENGTHS = {"Llama 3.2 1B": 4096, "Llama 3.1 8B": 8192}  # from which others are found
OPTIMIZERS = {"Llama 3.2 1B": "adamw", "Llama 3.1 8B": "adamw8bit"}


@experiment(page="results/explain.md")
def logits(for_gpu: str = "h100", time_limit_s: float = 2.0) -> Iterator[Case]:
    """Largest lengths with a vocabulary of 128k, with the logits in chunks and without; trained on this CPU."""
    yield Case(checked, {"time_limit_s": time_limit_s}, on_this_machine=True)
    for model in ON_A_GPU:
        yield Case(told, {"model": model, "gpu": for_gpu, "time_limit_s": time_limit_s}, on_this_machine=True)


def told(model: str, gpu: str, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Two rows: as it is, and with the logits in chunks."""
    found = rt.explain(
        LLAMA, gpu=gpu, batch_size=1, length=LENGTHS[model], vocabulary=VOCABULARY, dtype="bfloat16",
        implementations="joint", optimizer=OPTIMIZERS[model], time_limit_s=time_limit_s, **ON_A_GPU[model],
    )  # fmt: skip
    yield from _lengths(found, model)


def _lengths(found: rt.Explanation, model: str) -> Iterator[dict[str, Any]]:
    in_chunks = found.in_chunks
    assert in_chunks is not None
    for name, peak, largest in (
        ("default", found.plain_peak_bytes, found.largest), ("joint", in_chunks.peak_bytes, in_chunks.largest),
    ):  # fmt: skip
        yield {
            "model": model, "implementations": name, "budget_bytes": found.budget_bytes, "plain_bytes": peak,
            "largest": {f"{overhead:.0%}": size for overhead, size in largest["length"].items()},
        }  # fmt: skip


def checked(time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Two rows of a small model, whose step is trained at the length that explain names for the overhead."""
    torch.set_num_threads(2)
    options: dict[str, Any] = dict(SMALL)
    found = rt.explain(
        LLAMA, gpu="cpu", budget=CPU_BUDGET, optimizer=None, length=256, implementations="joint",
        time_limit_s=time_limit_s, **options,
    )  # fmt: skip
    for row in _lengths(found, "Llama, small"):
        length = row["largest"][f"{OVERHEAD:.0%}"]
        torch.manual_seed(0)
        plain, args = load_target(LLAMA)(length=length, **SMALL)
        for x in args:
            x.random_(VOCABULARY)
        module = planned(
            copy.deepcopy(plain), args, found.budget_bytes, strategy="search", cost="roofline", gpu="cpu",
            implementations=row["implementations"], time_limit_s=5 * time_limit_s,
        )  # fmt: skip
        before, plan = there_before(module.plan), module.plan.plan
        measured = {
            "length": length, "choices": sorted({name for name in plan.choices if name.startswith("cross_entropy")}),
            "plain_measured_bytes": before + peak_of_step(plain, args, {}, "cpu"),
            "processor_ratio": times_beside(plain, module, args, "cpu", 3, time.process_time)["measured_ratio"],
        }  # fmt: skip
        yield Beside(plain, args).add(module, row | promise_of(module.plan) | measured, before)


def _logits(row: Row) -> str:
    return "whole" if row["implementations"] == "default" else "in chunks"


LONGEST: Mapping[str, Column] = {
    "model": lambda row: f"{row['model']}, {row.get('gpu') or 'this CPU'}", "budget": "{budget_bytes:.3f GB}",
    "logits": _logits, "plain peak": "{plain_bytes:.3f GB}",
}  # fmt: skip
TRAINED: Mapping[str, Column] = {
    "logits": _logits, "length": "{length:,}", "plain step": "{plain_measured_bytes:.3f GB}",
    "under the plan": "{measured_bytes:.3f GB}", "budget": "{budget_bytes:.3f GB}", "cost": "{overhead:.2%}",
    "processor time": "x {processor_ratio:.2f}", "difference": "{difference:.1e}",
}  # fmt: skip


@logits.draws
def page(rows: Sequence[Row]) -> Drawing:
    """The lengths, and the steps that were trained at them."""
    lengths: Mapping[str, Column] = {
        f"length at {share}": lambda row, share=share: f"{size:,}" if (size := row["largest"][share]) else "none"
        for share in rows[0]["largest"]
    }
    trained = table_of([row for row in rows if row.get("gpu") is None], TRAINED)
    return Drawing(f"{made(rows, 'torch')}.\n\n{table_of(rows, {**LONGEST, **lengths})}\n\n{trained}")
