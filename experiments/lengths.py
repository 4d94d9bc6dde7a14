"""``make lengths``: ten sequence lengths of a GPT-2-like step of 12 layers, with padding and without.

The step is planned for one length; the others come up as in a loop. Each row has the seconds that remat adds to
PyTorch's own capture, the peak beside the budget, and whether the gradients are the plain model's bits.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

import remat.torch as rt
from experiments.arguments import Parser, output_file, run, seconds
from experiments.documents import ROOT
from experiments.pieces import pieces_of
from remat.torch import capture, module
from remat.torch.planner import Planner, there_before

RESULTS = ROOT / "results" / "lengths.json"
FIRST, LENGTHS = 256, (240, 224, 200, 192, 160, 128, 96, 64, 272, 288)  # longer ones too
BATCH, BUDGET, VOCABULARY = 4, 0.6, 1000


def model_of() -> nn.Module:
    """A GPT-2-like model of 12 layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=192, n_head=6, vocab_size=VOCABULARY, n_positions=512,
                                      use_cache=False, bos_token_id=1, eos_token_id=2))  # fmt: skip


def batch(length: int, is_padded: bool) -> dict[str, torch.Tensor]:
    """Tokens and labels; with a mask of which the last quarter of half the rows is padding."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, length))
    if not is_padded:
        return {"input_ids": tokens, "labels": tokens.clone()}
    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[BATCH // 2 :, -length // 4 :] = 0
    return {"input_ids": tokens, "labels": tokens.where(mask == 1, -100), "attention_mask": mask}


def measured(is_padded: bool, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """A row for each length, the first one included."""
    plain = model_of()
    planned = rt.rematerialize(
        copy.deepcopy(plain), (), BUDGET, sample_kwargs=batch(FIRST, is_padded), time_limit_s=time_limit_s
    )
    for length in (FIRST, *LENGTHS):
        inputs, known = batch(length, is_padded), set(planned._planner.plans)
        with added_seconds() as spent:
            began = time.perf_counter()
            ours = gradients(planned, inputs)
            first_s = time.perf_counter() - began
        plan = next((p for key, p in planned._planner.plans.items() if key not in known), planned.plan)
        same = all(map(torch.equal, gradients(plain, inputs), ours))
        planned.zero_grad()
        peak = there_before(plan) + rt.measured_peak(lambda inputs=inputs: planned(**inputs).loss.backward())
        planned.zero_grad()
        yield {
            "padded": is_padded, "length": length, "plan": plan.strategy, "added_s": round(sum(spent), 2),
            "first_step_s": round(first_s, 2), "budget_bytes": plan.budget_bytes, "predicted_bytes": plan.peak_bytes,
            "measured_bytes": peak, "recomputed": len(plan.recomputed), "overhead": round(plan.overhead, 5),
            "same_bits": same,
        }  # fmt: skip


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Of a step from the same random numbers."""
    model.zero_grad()
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@contextmanager
def added_seconds() -> Iterator[list[float]]:
    """The seconds in which remat reads the captured step, plans it and writes both halves."""
    spent: list[float] = []

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent.append(time.perf_counter() - began)

        return call

    with (
        mock.patch.object(Planner, "plan", timed(Planner.plan)),
        mock.patch.object(module, "step_of", timed(module.step_of)),
        mock.patch.object(module, "emit", timed(module.emit)),
        mock.patch.object(capture, "read_training_graph", timed(capture.read_training_graph)),
    ):
        yield spent


def main(arguments: list[str] | None = None) -> None:
    """Write the file of results, and print its rows."""
    parser = Parser(prog="python -m experiments.lengths", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--time-limit", type=seconds, default=30.0, help="seconds of search for the first length")
    parser.add_argument("--again", action="store_true", help="measure finished lengths too")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    chosen = parser.parse_args(arguments)
    settings = {"time_limit_s": chosen.time_limit, "threads": torch.get_num_threads()}
    pieces = pieces_of(chosen.out, "padded", settings)
    for is_padded in (False, True):
        if not chosen.again and pieces.has(is_padded):
            print(f"padded={is_padded}: measured before, in {chosen.out}")
            continue
        rows = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for row in measured(is_padded, chosen.time_limit):
                rows.append(row)
                print(json.dumps(row), flush=True)
        pieces.put(is_padded, rows)


if __name__ == "__main__":
    run(main)
