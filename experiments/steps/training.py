"""Small models from transformers: whether they train under a plan, with the bits of the plain steps."""

import copy
import inspect
import re
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from experiments.coverage import ARCHITECTURES
from experiments.steps.measure_step import planned
from remat.errors import InvalidInput
from remat.torch.measuring.measure import relative_difference

Inputs = dict[str, torch.Tensor]
# `conf/architectures.yaml` has the same vocabulary, classes, pixels and, twice its positions, frames.
VOCABULARY, BATCH, LENGTH, CLASSES, PIXELS, SAMPLES, FRAMES = 99, 4, 24, 5, 64, 1600, 64
BUDGETS = (0.7, 0.8, 0.9, 1.0)  # shares of the plain step's peak; the first one with a plan counts
NO_PLAN = "no plan of"  # begins the message of a budget that is too small
STEPS, LEARNING_RATE = 2, 0.1
NO_MASK, MASKS = "", ("all ones", "padding on the left", "padding on the right")
PADDING = 5  # positions of every second sequence


def _tokens() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, LENGTH))


def _classes(n: int = CLASSES) -> torch.Tensor:
    return torch.randint(0, n, (BATCH,))


INPUTS: Mapping[str, Callable[[], Inputs]] = {
    "text": lambda: {"input_ids": _tokens(), "labels": _tokens()},
    "labelled_text": lambda: {"input_ids": _tokens(), "labels": _classes(2)},
    "image": lambda: {"pixel_values": torch.randn(BATCH, 3, PIXELS, PIXELS), "labels": _classes()},
    "wave": lambda: {"input_values": torch.randn(BATCH, SAMPLES), "labels": _classes()},
    "spectrum": lambda: {"input_values": torch.randn(BATCH, 64, 16), "labels": _classes()},
    "speech": lambda: {"input_features": torch.randn(BATCH, 16, FRAMES), "labels": _tokens()},
}


def covered(name: str, time_limit_s: float, cost: str, masks: Container[str] = MASKS) -> list[dict[str, Any]]:
    """One row: whether the architecture trains, and how its results compare with the plain model's."""
    architecture = ARCHITECTURES[name]
    torch.manual_seed(0)
    kind = getattr(transformers, architecture.model)
    model, inputs = kind(kind.config_class(**architecture.settings)).train(), INPUTS[architecture.inputs]()
    steps = {mask: given for mask, given in _steps(model, inputs).items() if mask == NO_MASK or mask in masks}
    plain = _trained(copy.deepcopy(model), steps)
    row: dict[str, Any] = {"group": architecture.group, "trains": False}
    for budget in BUDGETS:
        began = time.perf_counter()
        try:
            module = planned(
                copy.deepcopy(model), (), budget, sample_kwargs=inputs, cost=cost, time_limit_s=time_limit_s
            )
            row |= {"budget": budget, "seconds": round(time.perf_counter() - began, 1)}
            ours = _trained(module, steps)
        except InvalidInput as error:
            row["message"] = re.sub(r"/\S*/site-packages/", "", str(error))  # without a path of this machine
            if str(error).startswith(NO_PLAN):
                continue
            break
        row.pop("message", None)
        n, again = len(module.plan.graph), len(module.plan.recomputed)
        differences = {mask: _difference(plain[mask], ours[mask]) for mask in steps}
        row |= {"trains": True, "operations": n, "recomputed": again, "difference": differences.pop(NO_MASK)}
        return [row | {"masks": differences}]
    return [row]


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
