"""The answers of `remat.torch.explain`, and checks of them, see docs/results/explain.md."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import remat.torch as rt
from experiments.documents import Column, Drawing, cells, made, markdown_table, table_of
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import Beside, planned, promise_of
from remat.frontends.spec import load_target
from remat.torch.measuring.measure import peak_of_step
from remat.torch.planning.planner import there_before

GPT2, LLAMA = "remat.torch.networks.transformer:gpt2", "remat.torch.networks.llama:llama"
ON_A_GPU: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 medium": (GPT2, {"batch_size": 8, "length": 1024, "width": 1024, "n_layers": 24, "n_heads": 16}),
    "Llama 7B": (LLAMA, {"batch_size": 1, "length": 4096, "dtype": "bfloat16"}),
    "Llama 7B, one of 8 ranks": (LLAMA, {"batch_size": 1, "length": 4096, "dtype": "bfloat16", "shard": 8}),
}
SMALL = {"batch_size": 4, "length": 128, "vocabulary": 1000, "width": 128, "n_layers": 4, "n_heads": 4}
ON_A_CPU: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GPT-2, small": (GPT2, SMALL | {"context": 128}),
    "Llama, small": (LLAMA, SMALL | {"hidden": 344}),
}
CPU_BUDGET = "80MB"


@experiment(page="results/explain.md")
def explain(for_gpu: str = "h100", time_limit_s: float = 2.0) -> Iterator[Case]:
    """Answers of remat explain for GPT-2 medium and Llama 7B, and checks of smaller models on this CPU."""
    for model in ON_A_GPU:
        yield Case(told, {"model": model, "gpu": for_gpu}, on_this_machine=True)
    for model in ON_A_CPU:
        yield Case(checked, {"model": model, "time_limit_s": time_limit_s}, on_this_machine=True)


def told(model: str, gpu: str) -> Iterator[dict[str, Any]]:
    """One row, with everything that is said of a model."""
    target, options = ON_A_GPU[model]
    found = rt.explain(target, gpu=gpu, **options)
    yield {
        "operations": len(found.graph), "budget_bytes": found.budget_bytes, "plain_bytes": found.plain_peak_bytes,
        "least_bytes": found.least_bytes, "changes": dict(found.changes),
        "overheads": {f"{share:.0%}": overhead for share, overhead in found.overheads.items()},
        "largest": {
            what: {f"{overhead:.0%}": size for overhead, size in sizes.items()} for what, sizes in found.largest.items()
        },
    }  # fmt: skip


def checked(model: str, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Rows of batches that are said to be the largest within a budget, and of the next ones, trained."""
    target, options = ON_A_CPU[model]
    found = rt.explain(target, gpu="cpu", budget=CPU_BUDGET, time_limit_s=time_limit_s, **options)
    for allowed, size in found.largest["batch"].items():
        for batch in () if size is None else (size, size + 1):
            plain, args = load_target(target)(**{**options, "batch_size": batch})
            for x in args:
                x.random_(options["vocabulary"])
            module = planned(
                plain, args, found.budget_bytes, optimizer="adamw", strategy="search", cost="roofline", gpu="cpu",
                time_limit_s=time_limit_s,
            )  # fmt: skip
            before = there_before(module.plan)
            row = {"allowed": allowed, "largest_batch": size, "batch_size": batch, **promise_of(module.plan)}
            row["plain_bytes"] = before + peak_of_step(plain, args, {}, "cpu")
            yield Beside(plain, args).add(module, row, before)


ANSWERS: Mapping[str, Column] = {
    "seconds to answer": "{case_s:.0f}", "operations": "{operations:,}", "budget": "{budget_bytes:.2f GB}",
    "plain peak": "{plain_bytes:.2f GB}", "smallest budget": "{least_bytes:.2f GB}",
}  # fmt: skip
CHECKS: Mapping[str, Column] = {
    "model": "{model}", "overhead": "{allowed:.0%}", "largest batch": "{largest_batch}",
    "trained batch": "{batch_size}", "plain step": "{plain_bytes:.3f MB}", "under the plan": "{measured_bytes:.3f MB}",
    "budget": "{budget_bytes:.3f MB}", "cost": "{overhead:.2%}",
}  # fmt: skip


@explain.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A column for each answer, and a line for each check."""
    columns = answers(rows)
    names = dict.fromkeys(name for column in columns.values() for name in column)
    told = markdown_table(["", *columns], [[name, *(of.get(name, "") for of in columns.values())] for name in names])
    checks = table_of([row for row in rows if row["gpu"] is None], CHECKS)
    return Drawing(f"{made(rows, 'torch')}.\n\n{told}\n\n{checks}")


def answers(rows: Sequence[Row]) -> dict[str, dict[str, str]]:
    """[model][what is said] text of each answer."""
    return {row["model"]: _answers(row) for row in rows if row["gpu"] is not None}


def _answers(row: Row) -> dict[str, str]:
    found = dict(zip(ANSWERS, cells(row, ANSWERS.values()), strict=True))
    for share, overhead in row["overheads"].items():
        found[f"overhead at {share} of the peak"] = "no plan" if overhead is None else f"{overhead:.1%}"
    for what, sizes in row["largest"].items():
        found |= {f"largest {what} at {n}": f"{size:,}" if size else "none" for n, size in sizes.items()}
    return found | {f"change by {what}": f"{n_bytes / 1e9:+.2f} GB" for what, n_bytes in row["changes"].items()}
