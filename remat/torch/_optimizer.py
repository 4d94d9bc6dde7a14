"""Bytes of an optimizer's state: counted, or found by a step of a copy on tensors without contents."""

from __future__ import annotations

import collections
import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakTensorKeyDictionary

from remat.errors import InvalidInput, unknown_name, warn
from remat.torch._work import local_part, tensors_of
from remat.units import format_size, parse_size

STATES = {"sgd": 0, "momentum": 1, "rmsprop": 1, "adagrad": 1, "lion": 1, "adam": 2, "adamw": 2}
SLACK_BYTES = 2**20  # counters of steps and the like


def state_bytes(optimizer: torch.optim.Optimizer | str | int | None, parameters: Iterable[nn.Parameter]) -> int:
    """Bytes of optimizer state from the first step on.

    Args:
        optimizer: one of PyTorch's; or a name (``adam`` holds two tensors of the size of each trained parameter); or
            a size; None counts nothing.
        parameters: the model's.

    Raises:
        InvalidInput: unknown name, or an optimizer whose step fails without contents.
    """
    trained = [p for p in parameters if p.requires_grad]
    if optimizer is None:
        return 0
    if isinstance(optimizer, torch.optim.Optimizer):
        return _of_optimizer(optimizer)
    if isinstance(optimizer, str) and optimizer.lower() in STATES:
        return STATES[optimizer.lower()] * sum(p.numel() * p.element_size() for p in trained)
    if isinstance(optimizer, str) and not optimizer[:1].isdigit():
        raise unknown_name("optimizer", optimizer, STATES)
    if not isinstance(optimizer, (str, int)):
        raise InvalidInput(
            "optimizer must be a torch.optim.Optimizer, a name (e.g. 'adam') or a size (e.g. '2GB'), "
            f"not {optimizer!r:.60}"
        )
    return parse_size(optimizer)


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
    new = [
        {**group, "params": [_without_contents(p) for p in group["params"] if p not in optimizer.state]}
        for group in optimizer.param_groups
    ]
    if not any(p.requires_grad for group in new for p in group["params"]):
        return _bytes_of(optimizer.state)
    tried = copy.copy(optimizer)
    tried.state, tried.param_groups = collections.defaultdict(dict), new
    for group in tried.param_groups:
        group.update({key: False for key in ("foreach", "fused", "capturable") if key in group})
    try:
        with torch.no_grad():
            tried.step()
    except Exception as error:
        raise InvalidInput(
            f"the state of {type(optimizer).__name__} cannot be counted ({type(error).__name__}: {error}); "
            "give optimizer= as a size, e.g. '2GB'"
        ) from error
    return _bytes_of(optimizer.state) + _bytes_of(tried.state)


def _without_contents(parameter: Tensor) -> nn.Parameter:
    bare = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    bare.grad = torch.empty_like(bare) if parameter.requires_grad else None
    return bare


def _bytes_of(state: Any) -> int:
    held = {id(x): x for x in tensors_of(list(state.values()))}
    return sum(x.numel() * x.element_size() for x in map(local_part, held.values()))
