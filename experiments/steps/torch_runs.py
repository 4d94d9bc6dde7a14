"""Real steps of PyTorch models: random arguments, and times of steps. Needs nothing but PyTorch."""

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remat.frontends.spec import ModelSpec, load_target
from remat.torch.frontend import build


def built(spec: ModelSpec, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module that returns its loss, in training mode, and random arguments, both on the device; always the same."""
    torch.manual_seed(0)
    model, args, loss = build.build(spec, load_target(spec.target), device)
    step, args = build.loss_step(model, args, loss)
    return step.to(device).train(), tuple(filled(x, device, classes_of(model)) for x in args)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy with the same parameters and buffers."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def classes_of(model: nn.Module) -> int:
    """Integers below this number are valid indices and classes: rows of the largest table, or of the last layer."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    heads = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    return max([2, *(tables or heads[-1:])])


def filled(x: Any, device: str, n_classes: int) -> Any:
    """A random tensor of the same shape and type on the device; anything else as it is."""
    if not isinstance(x, Tensor):
        return x
    if x.is_floating_point():
        return torch.randn(x.shape, dtype=x.dtype, device=device)
    return torch.randint(0, n_classes, x.shape, dtype=x.dtype, device=device)


QUARTILES = (0.25, 0.5, 0.75)
Clock = Callable[[], float]  # `time.perf_counter`, or `time.process_time` on a busy machine


def step_seconds(module: nn.Module, args: Sequence[Any], device: str, clock: Clock = time.perf_counter) -> float:
    """Seconds of one forward and backward pass, without the optimizer's step; gradients are dropped afterwards."""
    synchronize = torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    synchronize()
    began = clock()
    module(*args).backward()
    synchronize()
    took = clock() - began
    module.zero_grad()
    return took


def paired_seconds(
    steps: Sequence[nn.Module], args: Sequence[Any], device: str, rounds: int, clock: Clock = time.perf_counter
) -> list[list[float]]:  # fmt: skip
    """[steps][rounds] seconds of steps; their order changes in each round, because the first one finds other caches."""
    seconds: list[list[float]] = [[] for _ in steps]
    for i in range(rounds):
        turns = list(zip(steps, seconds, strict=True))
        for step, own in turns if i % 2 == 0 else reversed(turns):
            own.append(step_seconds(step, args, device, clock))
    return seconds


def times_beside(
    plain: nn.Module, module: nn.Module, args: Sequence[Any], device: str, rounds: int,
    clock: Clock = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Medians of the plain step and the module's, and of their ratio, with quartiles."""
    of_plain, ours = paired_seconds((plain, module), args, device, rounds, clock)
    low, ratio, high = np.quantile(np.divide(ours, of_plain), QUARTILES).tolist()
    return {"plain_s": statistics.median(of_plain), **spread(ours),
            "measured_ratio": ratio, "ratio_quartiles": [low, high]}  # fmt: skip


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """The median of several steps, and the quartiles."""
    low, middle, high = np.quantile(seconds, QUARTILES).tolist()
    return {"measured_s": middle, "measured_quartiles_s": [low, high]}
