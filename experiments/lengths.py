"""Ten sequence lengths of a GPT-2-like step, with padding and without, see docs/results/any-model.md."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from experiments.documents import Column, Drawing, made, table_of
from experiments.registry import Case, Row, experiment
from experiments.steps.measure_step import Beside, planned, promise_of
from remat.torch.planning.planner import there_before
from remat.units import format_size

FIRST, LENGTHS = 256, (240, 224, 200, 192, 160, 128, 96, 64, 272, 288)  # longer ones too
BATCH, BUDGET, VOCABULARY = 4, 0.6, 1000


@experiment(page="results/any-model.md")
def lengths(time_limit_s: float = 30.0, threads: int = 2) -> Iterator[Case]:
    """Ten sequence lengths of a GPT-2-like step: seconds to plan each, memory, bits."""
    for padded in (False, True):
        yield Case(measured, {"padded": padded, "time_limit_s": time_limit_s, "threads": threads}, on_this_machine=True)


def measured(padded: bool, time_limit_s: float, threads: int) -> Iterator[dict[str, Any]]:
    """A row for each length; the step is planned for the first one, and the others come up as in a loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    plain = GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=192, n_head=6, vocab_size=VOCABULARY, n_positions=512,
                                       use_cache=False, bos_token_id=1, eos_token_id=2))  # fmt: skip
    module = planned(copy.deepcopy(plain), (), BUDGET, sample_kwargs=batch(FIRST, padded), time_limit_s=time_limit_s)
    for length in (FIRST, *LENGTHS):
        inputs = batch(length, padded)
        module(**inputs).loss.backward()
        module.zero_grad()
        (plan,) = module.prepare((), sample_kwargs=inputs)  # the one that the call has made
        known = {"length": length, "plan": plan.strategy, "added_s": plan.added_s, **promise_of(plan)}
        yield Beside(plain, (), inputs).add(module, known, there_before(plan))


def batch(length: int, padded: bool) -> dict[str, Any]:
    """Tokens and labels; with a mask of which the last quarter of half the rows is padding."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, length))
    if not padded:
        return {"input_ids": tokens, "labels": tokens.clone()}
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[BATCH // 2 :, -length // 4 :] = 0
    return {"input_ids": tokens, "labels": tokens.where(mask == 1, -100), "attention_mask": mask}


COLUMNS: Mapping[str, Column] = {
    "length": "{length}", "padded": lambda row: "yes" if row["padded"] else "no", "plan": "{plan}",
    "seconds added": "{added_s:.2f}", "repeats": "{recomputed}", "overhead": "{overhead:.2%}",
    "measured of budget": lambda row: f"{format_size(row['measured_bytes'], digits=3)}, "
                                      f"{row['measured_bytes'] / row['budget_bytes']:.1%}",
    "the plain model's bits": lambda row: "no" if row["difference"] else "yes",
}  # fmt: skip


@lengths.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A line for each length."""
    return Drawing(f"Lengths: {made(rows, 'torch', threads='threads')}.\n\n{table_of(rows, COLUMNS)}")
