"""The best checkpoints in PyTorch's own languages and in other executors', see docs/results/checkpoints.md."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

import remat.torch as rt
from experiments.documents import Drawing, made, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import Beside, planned, promise_of, step_for_a_cpu
from experiments.steps.torch_runs import sharing_copy
from remat.errors import InvalidInput
from remat.torch.following.module import Rematerialized
from remat.torch.planning.planner import there_before
from remat.units import format_size

LANGUAGES = ("blocks", "selective")
LANGUAGES_OF_ALL = ("selective", "fsdp2", "torch_remat", "blocks", "transformers", "torchtitan")
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
    beside = Beside(plain, args)
    beside.add(free, {"variant": "free", **promise_of(free.plan)}, there_before(free.plan))
    added = [_added(beside, free, language, {"variant": language}) for language in LANGUAGES]
    yield from (row for row in added if "message" in row)
    yield from beside.timed(rounds)


def _added(beside: Beside, free: Rematerialized, language: str, row: dict[str, Any]) -> dict[str, Any]:
    """Measure the best checkpoints in a language, within the budget of the free plan; without any, `row` says why."""
    row |= {"budget_bytes": free.plan.budget_bytes}
    try:
        found = rt.checkpoints(free, beside.args, sample_kwargs=beside.kwargs, language=language)
    except InvalidInput as error:
        return row | {"message": str(error)}
    row |= {"predicted_bytes": found.peak_bytes, "overhead": found.overhead, "gap": found.gap}
    return beside.add(found.apply(sharing_copy(beside.plain)), row, there_before(free.plan))


@checkpoints.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each network and budget."""
    of = {(row["model"], row["share"], row["variant"]): row for row in rows}
    table = markdown_table(
        ["network", "budget", *(f"{variant}: overhead, measured" for variant in VARIANTS)],
        [[name, f"{share:g}", *(_cell(of.get((name, share, variant))) for variant in VARIANTS)]
         for name, share in dict.fromkeys((row["model"], row["share"]) for row in rows)],
    )  # fmt: skip
    facts = made(rows, "torch", threads="threads", rounds="paired rounds", time_limit_s="s of search")
    return Drawing(f"{facts}. {_executed(rows)}\n\n{table}")


def _executed(rows: Sequence[Row]) -> str:
    executed = [row for row in rows if row["measured_bytes"] is not None]
    over = max(row["measured_bytes"] - row["predicted_bytes"] for row in executed)
    differing = sum(row["difference"] != 0 for row in executed)
    return (
        f"Of {len(executed)} executed steps, {differing} differ from the plain one in a bit; the largest measured peak "
        f"above its promise: {format_size(max(0, over), digits=3)}."
    )


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None or row["overhead"] is None:
        return "does not fit"
    low, middle, high = statistics.quantiles(row["ratios"], n=4)
    return f"{row['overhead']:.1%}, {middle - 1:.1%} ({low - 1:.1%} to {high - 1:.1%})"


@experiment(page="results/checkpoints.md")
def languages(
    models: Sequence[str] = ("gpt2", "llama", "vit"), shares: Sequence[float] = (0.85, 0.7), n_layers: int = 6,
    time_limit_s: float = 10.0, threads: int = 1,
) -> Iterator[Case]:  # fmt: skip
    """Models of transformers: the best plan in each language of checkpoints, its proven gap, and its loss."""
    for model in models:
        what = {"model": model, "shares": [*shares], "n_layers": n_layers, "time_limit_s": time_limit_s}
        code = [version(each) for each in ("transformers", "torch_remat") if find_spec(each)]
        yield Case(in_every_language, what | {"threads": threads}, code, on_this_machine=True)


def in_every_language(
    model: str, shares: Sequence[float], n_layers: int, time_limit_s: float, threads: int
) -> Iterator[dict[str, Any]]:
    """A row for each budget and language, the free plan among them."""
    torch.set_num_threads(threads)
    plain, inputs = transformer(model, n_layers)
    for share in shares:
        free = planned(plain, (), share, sample_kwargs=inputs, time_limit_s=time_limit_s)
        beside = Beside(plain, (), inputs)
        yield beside.add(free, {"share": share, "language": "free", **promise_of(free.plan)}, there_before(free.plan))
        for language in LANGUAGES_OF_ALL:
            yield _added(beside, free, language, {"share": share, "language": language})


def transformer(name: str, n_layers: int) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model of transformers for a CPU, and keyword arguments of a step that returns the loss."""
    import transformers

    torch.manual_seed(0)
    kind = getattr(transformers, {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}.get(
        name, "ViTForImageClassification"))  # fmt: skip
    size = {"hidden_size": 128, "num_hidden_layers": n_layers, "num_attention_heads": 4, "intermediate_size": 384}
    if name == "vit":
        model = kind(kind.config_class(**size, image_size=64, patch_size=4))
        inputs = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 2, (8,))}
    else:
        tokens = {"vocab_size": 1000, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        ids = torch.randint(3, 1000, (8, 128))
        model, inputs = kind(kind.config_class(**size, **tokens)), {"input_ids": ids, "labels": ids}
    return model.train(), inputs


@languages.draws
def table_of_languages(rows: Sequence[Row]) -> Drawing:
    """A line for each language, a column for each network and budget."""
    of = {(row["model"], row["share"], row["language"]): row for row in rows}
    columns = [*dict.fromkeys((row["model"], row["share"]) for row in rows)]
    table = markdown_table(
        ["language", *(f"{name} at {share:g}" for name, share in columns), "largest gap"],
        [[name, *(_loss(of.get((*column, name)), of[(*column, "free")]) for column in columns),
          _largest_gap([of.get((*column, name)) for column in columns])] for name in ("free", *LANGUAGES_OF_ALL)],
    )  # fmt: skip
    facts = made(rows, "torch", "transformers", n_layers="layers", time_limit_s="s of search for the free plan")
    return Drawing(f"{facts}. {_executed(rows)}\n\n{table}")


def _loss(row: Mapping[str, Any] | None, free: Mapping[str, Any]) -> str:
    if row is None or row["overhead"] is None:
        return "does not fit"
    loss = "" if row is free else f" (+{100 * (row['overhead'] - free['overhead']):.1f})"
    return f"{row['overhead']:.1%}{loss}"


def _largest_gap(rows: Sequence[Mapping[str, Any] | None]) -> str:
    gaps = [row["gap"] for row in rows if row is not None and row["gap"] is not None]
    return f"{max(gaps):.2%}" if gaps else ""
