"""The step of each model that was captured last, so that a plan within another budget needs no second capture.

It counts only while nothing that a capture depends on has changed: modules, their attributes and tensors, the arguments
but for their contents, the branches on these, and PyTorch's settings. What changes unseen (a global variable of the
model's code) shows when the step first runs: the compiler captures it again, and a step that differs gets its own plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from remat.torch.internals.autograd import storage_key
from remat.torch.internals.operators import tree_flatten
from remat.torch.measuring.plain import FollowedStep
from remat.torch.step.branches import Values
from remat.torch.step.loss import Outside
from remat.torch.step.training_graph import CapturedStep
from remat.torch.step.work import storage_bytes

DEEPEST = 4  # containers and objects within attributes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(slots=True)
class Known:
    """A step that was captured.

    Attributes:
        key: of everything that the capture depends on.
        step: without the tensors of its arguments and of the model, which it must not keep.
        primals: each one's index among the arguments, or the model's own tensor.
        followed: the plain step, with each loss that is not known.
    """

    key: Any
    step: CapturedStep
    primals: list[int | weakref.ref[Tensor]]
    followed: dict[Outside, FollowedStep] = field(default_factory=dict)

    def with_arguments(self, leaves: list[Any]) -> CapturedStep | None:
        """The step on these arguments; None if a tensor of the model is gone."""
        primals = [leaves[at] if isinstance(at, int) else at() for at in self.primals]
        if any(primal is None for primal in primals):
            return None
        return replace(self.step, training_graph=replace(self.step.training_graph, primals=tuple(primals)))


_of_models: weakref.WeakKeyDictionary[nn.Module, Known] = weakref.WeakKeyDictionary()


def known_step(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: str) -> Known | None:
    """What is known of the step on these arguments; None if it is another than the last one."""
    known = _of_models.get(model)
    return known if known is not None and known.key == _key(model, args, kwargs, inputs) else None


def note_step(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: str, step: CapturedStep
) -> None:  # fmt: skip
    """Keep a captured step instead of the last one, unless it reads tensors that are no one's arguments or model's."""
    _of_models.pop(model, None)
    leaves = tree_flatten((args, dict(kwargs)))[0]
    own = {id(x) for x in (*model.parameters(), *model.buffers())}
    places = {id(x): i for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    primals = list[int | weakref.ref[Tensor]]()
    for x in step.training_graph.primals:
        if id(x) in places:
            primals.append(places[id(x)])
        elif id(x) in own:
            primals.append(weakref.ref(x))
        else:
            return
    bare = replace(step, training_graph=replace(step.training_graph, primals=()))
    _of_models[model] = Known(_key(model, args, kwargs, inputs), bare, primals)


def _key(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], inputs: str) -> Any:
    leaves, structure = tree_flatten((args, dict(kwargs)))
    stored = {storage_key(x): i for i, x in reversed([*enumerate(leaves)]) if isinstance(x, Tensor)}
    held = {storage_key(x): name for name, x in (*model.named_parameters(), *model.named_buffers())}

    def argument(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return _described(x, DEEPEST)
        place = stored[storage_key(x)], held.get(storage_key(x)), x.storage_offset(), storage_bytes(x)
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_leaf, *place

    settings = (
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_autocast_cache_enabled(),
        *((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")),
        torch.get_float32_matmul_precision(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled,
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
    )  # fmt: skip
    branches = Values(model, args, kwargs, inputs).key()
    return structure, [argument(x) for x in leaves], branches, settings, [*map(_module, model.modules())]


def _module(module: nn.Module) -> Any:
    return id(module), type(module), type(module).forward, _described(vars(module), DEEPEST)


def _described(x: Any, depth: int) -> Any:
    """What decides how code that reads an attribute runs; equal again while that is unchanged."""
    if isinstance(x, _PLAIN):
        return type(x), x
    if isinstance(x, Tensor):
        return id(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    if isinstance(x, nn.Module) or depth == 0:
        return id(x)
    if isinstance(x, Mapping):
        return type(x), [(_described(k, depth - 1), _described(v, depth - 1)) for k, v in x.items()]
    if isinstance(x, (list, tuple, set, frozenset)):
        return type(x), [_described(item, depth - 1) for item in x]
    return id(x), [(name, _described(value, depth - 1)) for name, value in getattr(x, "__dict__", {}).items()]
