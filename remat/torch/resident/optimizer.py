"""Bytes of an optimizer's state: counted, or found by a step of a copy.

The copy has tensors without contents; for an optimizer that reads values it is on the CPU.
"""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from remat.errors import InvalidInput, shown, unknown_name, warn
from remat.torch.step.work import local_part, tensors_of
from remat.units import format_size, parse_size

STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
# Tensors of the size of a parameter that its update holds at once, beside gradient and state (foreach implementation)
TEMPORARIES = {"sgd": 0, "momentum": 0, "rmsprop": 1, "adagrad": 2, "lion": 1, "adam": 1, "adamw": 1}
BLOCK, LEAST_8BIT = 256, 4096  # of bitsandbytes: numbers with one float32 scale; with fewer, a state is in float32
SLACK_BYTES = 2**20  # counters of steps and the like


def state_bytes(optimizer: torch.optim.Optimizer | str | int | None, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of optimizer state from the first step on.

    Args:
        optimizer: one of PyTorch's; or a name (``adam`` holds two tensors of the size of each trained parameter,
            ``adamw8bit`` bitsandbytes' two of a byte for each number, ``adafactor`` PyTorch's rows and columns); or a
            size; None counts nothing.
        parameters: the model's.

    Raises:
        InvalidInput: unknown name, or an optimizer whose step fails.
    """
    trained = [p for p in parameters if p.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_optimizer(optimizer)
    if isinstance(optimizer, str) and optimizer.lower() in STATES:
        return STATES[optimizer.lower()] * sum(p.numel() * p.element_size() for p in trained)
    if isinstance(optimizer, str) and optimizer.lower() in BY_RULE:
        return BY_RULE[optimizer.lower()](trained)
    if isinstance(optimizer, str) and not optimizer[:1].isdigit():
        raise unknown_name("optimizer", optimizer, {*STATES, *BY_RULE})
    if not isinstance(optimizer, (str, int)):
        raise InvalidInput(
            "optimizer must be a torch.optim.Optimizer, a name (e.g. 'adam') or a size (e.g. '2GB'), "
            f"not {shown(optimizer)}"
        )
    return parse_size(optimizer)


def _of_adafactor(trained: list[nn.Parameter]) -> int:
    return _of_optimizer(torch.optim.Adafactor(trained)) if trained else 0


def _of_adam_8bit(trained: list[nn.Parameter]) -> int:
    sizes = [p.numel() for p in trained]
    return sum(2 * (n + 4 * -(-n // BLOCK)) if n >= LEAST_8BIT else 8 * n for n in sizes)


BY_RULE = {"adafactor": _of_adafactor, "adam8bit": _of_adam_8bit, "adamw8bit": _of_adam_8bit}  # name -> bytes of state


def watch(model: nn.Module, counted_bytes: Callable[[], int]) -> None:
    """Warn, once, if an optimizer that steps on any of the model's parameters holds more than is counted.

    Args:
        model: watched while it lives.
        counted_bytes: the bytes that the budget counts; this function must not hold the model.
    """
    watched = WeakTensorKeyDictionary((p, None) for p in model.parameters())
    alive = weakref.ref(model)
    seen: dict[int, int] = {}  # id of an optimizer -> for how many parameters it had state at the last check

    def check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if alive() is None or seen.get(id(optimizer)) == len(optimizer.state):
            return
        seen[id(optimizer)] = len(optimizer.state)
        if any(p in watched for group in optimizer.param_groups for p in group["params"]):
            held, counted = _bytes_of(optimizer.state), counted_bytes()
            if held > counted + SLACK_BYTES:
                handle.remove()
                warn(
                    f"{type(optimizer).__name__} holds {format_size(held)} of state, the budget counts "
                    f"{format_size(counted)}: the difference comes on top of the promised peak; give "
                    "rematerialize(..., optimizer=optimizer)"
                )

    handle = register_optimizer_step_post_hook(check)
    weakref.finalize(model, handle.remove)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of its state, and of the state that a step will add for parameters that have none yet."""
    groups = optimizer.param_groups
    new = [{**group, "params": [p for p in group["params"] if p not in optimizer.state]} for group in groups]
    held = _bytes_of(optimizer.state)
    if not any(p.requires_grad for group in new for p in group["params"]):
        return held
    with suppress(Exception):  # it may read values in any way
        return held + _made_by_a_step(optimizer, new, "meta")
    try:
        return held + _made_by_a_step(optimizer, new, "cpu")
    except Exception as error:
        raise InvalidInput(
            f"the state of {type(optimizer).__name__} cannot be counted ({type(error).__name__}: {error}); "
            "give optimizer= as a size, e.g. '2GB'"
        ) from error


def _made_by_a_step(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], device: str) -> int:
    """Bytes of the state that a step makes for copies of parameters on a device."""
    tried = copy.copy(optimizer)  # without what its class adds
    vars(tried).update({name: x for name, x in vars(optimizer).items() if isinstance(x, (int, float, str, type(None)))})
    tried.state = collections.defaultdict(dict)
    tried.param_groups = [{**group, "params": [_copy_of_ones(p, device) for p in group["params"]]} for group in groups]
    for group in tried.param_groups:
        group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
    with torch.no_grad():
        tried.step()
    return _bytes_of(tried.state)


def _copy_of_ones(parameter: Tensor, device: str) -> nn.Parameter:
    copied = nn.Parameter(torch.ones_like(parameter, device=device), parameter.requires_grad)
    copied.grad = torch.ones_like(copied) if parameter.requires_grad else None
    return copied


def _bytes_of(state: Any) -> int:
    held = {id(x): x for x in tensors_of(list(state.values()))}
    return sum(x.numel() * x.element_size() for x in map(local_part, held.values()))
