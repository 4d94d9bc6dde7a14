"""Branches of a model on the values of integer arguments, e.g. on a mask of ones: each outcome has its own graph.

In eager mode many models read a mask and leave it out where it masks nothing. A captured step takes the branch of the
arguments at hand. The calculation that decides is noted. It runs before each call, so that a step takes the graph of
its own outcomes, or is captured anew.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat.torch.internals.dynamo import Calculation
from remat.torch.internals.operators import fields_of, is_fake, tree_flatten
from remat.torch.step.work import tensors_of

MOST_BRANCHES = 6  # of one step; each may double the number of graphs

Outcomes = tuple[bool, ...]

# What is known of models: (what is known of the arguments without values, outcomes of the branches so far) -> next one.
Branches = dict[tuple[Any, Outcomes], Calculation]
_of_models: weakref.WeakKeyDictionary[nn.Module, Branches] = weakref.WeakKeyDictionary()


def is_readable(x: Any) -> bool:
    """Whether a model may branch on the values of an argument: of integers, e.g. a mask."""
    return isinstance(x, Tensor) and not (is_fake(x) or x.is_floating_point() or x.is_complex())


class Arguments:
    """A call's arguments, taken apart once.

    Attributes:
        leaves, structure: tensors and others, and where they are.
        inputs: shapes and dtypes of the tensors, see `describe_inputs`.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        if kwargs or not all(isinstance(x, Tensor) for x in args):
            self.leaves, self.structure = tree_flatten((args, dict(kwargs)))
        else:  # as in most steps
            self.leaves, self.structure = list(args), len(args)
        self.inputs = ", ".join(map(_described, self.leaves)) or "no inputs"


def describe_inputs(args: Any) -> str:
    """Shapes and dtypes of tensors in a structure of arguments, e.g. ``float32[32, 3, 224, 224]``."""
    return Arguments((args,), {}).inputs


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        return _described_tensor(x.dtype, tuple(x.shape), x.device.type)
    if isinstance(x, (bool, int, float, complex, str, torch.dtype, type(None))):
        return repr(x)[:40]
    held = tensors_of(fields_of(x))  # other representations may hold an address
    return type(x).__name__ + (f"({', '.join(map(_described, held))})" if held else "")


@functools.lru_cache(maxsize=1024)
def _described_tensor(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if device == 'cpu' else f'@{device}'}"


class NewBranches(Exception):
    """Ends the compilation of a step with branches that were not known; the next one knows them."""


class Values:
    """The values of a call's arguments, for the branches of a model.

    Attributes:
        found: outcomes of branches of the step that is traced now, if these were not known.
    """

    def __init__(self, model: nn.Module, arguments: Arguments):
        self.branches = _of_models.setdefault(model, {})
        self.leaves = arguments.leaves
        self.known = arguments.inputs, arguments.structure
        self.found: dict[Calculation, bool] = {}

    def outcomes(self) -> Outcomes:
        """Those of the branches that are known for such arguments."""
        return tuple(self._walk().values())

    def key(self) -> Any:
        """The same for calls that take the same branches; None if there are none."""
        return (self.known, outcomes) if (outcomes := self.outcomes()) else None

    def _walk(self) -> dict[Calculation, bool]:
        outcomes: dict[Calculation, bool] = {}
        while (branch := self.branches.get((self.known, tuple(outcomes.values())))) is not None:
            outcomes[branch] = branch.outcome(self.leaves)
        return outcomes

    def index(self, tensor: Any) -> int | None:
        """Index among the arguments of a tensor whose values may be read; None for others."""
        return next((i for i, leaf in enumerate(self.leaves) if leaf is tensor and is_readable(leaf)), None)

    def outcome(self, branch: Calculation) -> bool | None:
        """The outcome of a branch that is traced; None if the step has too many."""
        known = self._walk() | self.found
        if branch not in known and len(known) < MOST_BRANCHES:
            known[branch] = self.found[branch] = branch.outcome(self.leaves)
        return known.get(branch)

    def learn(self) -> bool:
        """At the end of a trace, know the branches that it found; returns whether there are any."""
        outcomes, found = self.outcomes(), self.found
        self.found = {}
        for branch, outcome in found.items():
            self.branches[self.known, outcomes] = branch
            outcomes += (outcome,)
        return bool(found)
