"""torchtitan's activation checkpoints: of every layer alike, with one set of operators, or none."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts, noop_context_fn

from remat.torch.checkpointing.for_fsdp2 import wrap

EVERY_SECOND = ("aten.mm.default", "aten.linear.default")  # of which torchtitan saves the first, the third, ... call
_FILE = '''"""{about}

In the trainer's configuration: ``activation_checkpoint={value}``. This file needs torchtitan.
"""

from dataclasses import dataclass

import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC


class PlannedAC(SelectiveAC):
    """Selective activation checkpoints with a planned set of operators; of products every second is saved."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return {{{operators}}}


ACTIVATION_CHECKPOINT = {value}
'''


def apply(model: nn.Module, checkpoints: Mapping[str, tuple[tuple[str, ...], bool]]) -> nn.Module:
    """Wrap these layers as torchtitan's ``SelectiveAC`` and ``FullAC`` do; returns the model."""
    for name, (kept, draws) in checkpoints.items():
        contexts = functools.partial(_contexts, kept) if kept else noop_context_fn
        wrap(model, name, context_fn=contexts, preserve_rng_state=draws, early_stop=False)
    return model


def _contexts(kept: tuple[str, ...]) -> Any:
    operators, seconds = ({attrgetter(name)(torch.ops) for name in names} for names in (kept, EVERY_SECOND))
    return create_selective_checkpoint_contexts(_policy(operators, seconds))


def _policy(operators: set[Any], seconds: set[Any]) -> Callable[..., CheckpointPolicy]:
    numbers = {False: itertools.count(1), True: itertools.count(1)}  # of the first run, and of the second

    def choose(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        is_odd = operator not in seconds or next(numbers[context.is_recompute]) % 2 == 1
        return CheckpointPolicy.MUST_SAVE if operator in operators and is_odd else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


def text(about: str, checkpoints: Mapping[str, tuple[tuple[str, ...], bool]]) -> str:
    """The file for torchtitan's users."""
    kept, draws = next(iter(checkpoints.values()), ((), False))
    options = "" if draws else "preserve_rng_state=False"
    value = f"{'PlannedAC' if kept else 'FullAC'}.Config({options})" if checkpoints else "None"
    operators = ", ".join(f"torch.ops.{operator}" for operator in kept) or "*()"
    return _FILE.format(about=about, value=value, operators=operators)
