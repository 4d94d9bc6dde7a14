"""``make coverage``: which architectures train under a plan, and whether their gradients are the plain model's bits.

Each architecture of `experiments.architectures` takes two steps as the plain model and two under a plan, with the same
random numbers. One that takes a mask does so again with a mask of ones, and with padding on the left and on the right;
the loop plans what these make new. Results go to ``results/coverage.json`` as they are made; a run goes on with those
that are missing.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import re
import time
import warnings
from collections.abc import Container, Mapping
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import remat.torch as rt
from experiments.architectures import ARCHITECTURES, LENGTH, Architecture, Inputs
from experiments.arguments import Parser, one_name, output_file, pattern, run, seconds
from experiments.documents import ROOT
from experiments.pieces import pieces_of
from experiments.training_tables import under_masks
from remat.cost import COST_MODELS
from remat.errors import InvalidInput
from remat.torch.measure import relative_difference

RESULTS = ROOT / "results" / "coverage.json"
BUDGETS = (0.7, 0.8, 0.9, 1.0)  # shares of the plain step's peak; the first one with a plan counts
NO_PLAN = "no plan of"  # begins the message of a budget that is too small
STEPS, LEARNING_RATE = 2, 0.1
NO_MASK, MASKS = "", ("all ones", "padding on the left", "padding on the right")
PADDING = 5  # positions of every second sequence


def covered(
    architecture: Architecture, time_limit_s: float, cost: str, masks: Container[str] = MASKS
) -> dict[str, Any]:  # fmt: skip
    """One row: whether the architecture trains, and how its results compare with the plain model's."""
    torch.manual_seed(0)
    model, inputs = architecture.build(), architecture.inputs()
    steps = {mask: given for mask, given in _steps(model, inputs).items() if mask == NO_MASK or mask in masks}
    plain = _trained(copy.deepcopy(model), steps)
    row: dict[str, Any] = {"name": architecture.name, "group": architecture.group, "trains": False}
    for budget in BUDGETS:
        began = time.perf_counter()
        try:
            planned = rt.rematerialize(copy.deepcopy(model), (), budget, sample_kwargs=inputs, cost=cost,
                                       time_limit_s=time_limit_s)  # fmt: skip
            row |= {"budget": budget, "seconds": round(time.perf_counter() - began, 1)}
            ours = _trained(planned, steps)
        except InvalidInput as error:
            row["message"] = re.sub(r"/\S*/site-packages/", "", str(error))  # without a path of this machine
            if str(error).startswith(NO_PLAN):
                continue
            break
        row.pop("message", None)
        n, again = len(planned.plan.graph), len(planned.plan.recomputed)
        differences = {mask: _difference(plain[mask], ours[mask]) for mask in steps}
        row |= {"trains": True, "operations": n, "recomputed": again, "difference": differences.pop(NO_MASK)}
        return row | {"masks": differences}
    return row


def _steps(model: nn.Module, inputs: Inputs) -> dict[str, Inputs]:
    """The arguments of steps without a mask, and by the name of a mask."""
    parameters, steps = inspect.signature(model.forward).parameters, {NO_MASK: inputs}
    given = next(iter(inputs.values()))
    is_sequence = given.dim() == 2 or "input_features" in inputs  # tokens, a wave, frames of speech
    if "attention_mask" in parameters and is_sequence:
        ones = torch.ones(given.shape[0], given.shape[-1], dtype=torch.long)
        left, right = ones.clone(), ones.clone()
        left[::2, :PADDING] = right[::2, -PADDING:] = 0
        for kind, mask in zip(MASKS, (ones, left, right), strict=True):
            steps[kind] = {**inputs, "attention_mask": mask}
            if "decoder_attention_mask" in parameters:
                steps[kind]["decoder_attention_mask"] = mask[:, :LENGTH]
    return steps


def _trained(model: nn.Module, steps: Mapping[str, Inputs]) -> dict[str, dict[str, torch.Tensor]]:
    """What `_after` gives for each kind of step, from the same start."""
    start = copy.deepcopy(model.state_dict())
    results = {}
    for kind, inputs in steps.items():
        model.load_state_dict(start)
        results[kind] = {name: x.clone() for name, x in _after(model, inputs).items()}
    return results


def _after(model: nn.Module, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Losses, last gradients, parameters and buffers after some steps of plain gradient descent."""
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE), {}
    torch.manual_seed(1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        kept[f"loss {step}"] = loss.detach()
    kept |= {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return kept | dict(model.state_dict())


def _difference(plain: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> float | None:
    """Largest difference, relative to a tensor's largest number; 0 for the same bits, None if a tensor is missing."""
    if plain.keys() != ours.keys():
        return None
    return max((relative_difference(plain[name], ours[name]) for name in plain), default=0.0)


def main(arguments: list[str] | None = None) -> None:
    """Fill the file of results, and print how many architectures train."""
    parser = Parser(prog="python -m experiments.coverage", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--only", type=pattern, default="", help="regular expression on names")
    parser.add_argument("--time-limit", type=seconds, default=2.0, help="seconds of search for each; default 2")
    parser.add_argument("--cost", type=one_name("cost model", lambda: COST_MODELS), default="roofline")
    parser.add_argument("--again", action="store_true", help="also those that have a result")
    parser.add_argument("--out", type=output_file, default=RESULTS)
    chosen = parser.parse_args(arguments)
    if not (named := [name for name in ARCHITECTURES if re.search(chosen.only, name)]):
        raise InvalidInput("no architecture; see --only")
    settings = {"time_limit_s": chosen.time_limit, "cost": chosen.cost}
    pieces = pieces_of(chosen.out, "name", settings | {"transformers": version("transformers")})
    for name in (name for name in named if chosen.again or not pieces.has(name)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = covered(ARCHITECTURES[name], chosen.time_limit, chosen.cost)
        torch._dynamo.reset()
        pieces.put(name, [row])
        print(json.dumps(row), flush=True)
    rows = pieces.rows()
    trained = [row for row in rows if row["trains"]]
    same = sum(row["difference"] == 0 for row in trained)
    print(f"{len(trained)} of {len(rows)} architectures train, {same} of them with the plain model's bits")
    print(f"with the plain model's bits under a mask: {under_masks(rows)}")


if __name__ == "__main__":
    run(main)
