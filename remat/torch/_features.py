"""Tensors that a module returns or stores, and also uses: outside, their gradients are not those of the plain step.

The backward pass of a planned step is one node of the autograd graph, with all outputs as its results. What flows into
such a feature from another output stays inside of this node. Whoever reads the feature's gradient would get the rest
without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils.hooks import unserializable_hook

from remat.errors import InvalidInput
from remat.torch import _private
from remat.torch._work import tensors_of

_NOT_THE_USER = ("remat.", "torch.distributed.")  # their hooks do not read the gradient
_REFUSED = (
    "a hook, retain_grad() or autograd.grad on a tensor that the module returns or stores, and also uses, would miss "
    "the gradient from inside of the planned step: use .model for that, or use the tensor outside of the module alone"
)


def used_features(graph: fx.GraphModule) -> dict[int, frozenset[int]]:
    """[index of an output of Dynamo's graph] other outputs through which gradients flow into it."""
    outputs: Any = graph.graph.find_nodes(op="output")[0].args[0]
    used = {}
    for i, feature in enumerate(outputs):
        if isinstance(feature, fx.Node) and feature.op != "placeholder":
            reached = _differentiable_users(feature)
            others = frozenset(j for j, x in enumerate(outputs) if x in reached)
            used |= {i: others} if others else {}
    return used


def _differentiable_users(node: fx.Node) -> set[fx.Node]:
    """All nodes that depend on this one and need a gradient."""
    found, todo = set[fx.Node](), [node]
    while todo:
        new = {user for user in todo.pop().users if user not in found and user.op != "output" and _needs_gradient(user)}
        found |= new
        todo.extend(new)
    return found


def _needs_gradient(node: fx.Node) -> bool:
    tensors = tensors_of(_private.example_of(node))
    return not tensors or any(x.requires_grad for x in tensors)


def watched(step: Callable[..., Sequence[Any]], used: Mapping[int, frozenset[int]]) -> Callable[..., Sequence[Any]]:
    """A compiled step of Dynamo's graph that refuses to give a part of a feature's gradient.

    Args:
        used: as `used_features` gives it.
    """

    def run(*args: Any) -> Sequence[Any]:
        outputs, given = step(*args), set(map(id, args))  # the gradient of an argument is complete
        needs = {i: x for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad}
        _watch({i: x for i, x in needs.items() if id(x) not in given}, used)
        return outputs

    return run


def _watch(needs: Mapping[int, Tensor], used: Mapping[int, frozenset[int]]) -> None:
    """Let the backward pass look whether somebody reads the gradient of a feature."""
    passes: dict[int, int] = {}  # output -> the last backward pass that brought it a gradient

    def note(i: int) -> None:
        @unserializable_hook
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None:
                passes[i] = _private.backward_pass()

        needs[i].register_hook(hook)

    def check(i: int) -> None:
        @unserializable_hook
        def hook(_gradient: Tensor | None) -> None:
            if any(passes.get(j) == _private.backward_pass() for j in used[i]) and _is_read(feature(), hooks()):
                raise InvalidInput(_REFUSED)

        needs[i].register_hook(hook)
        feature, hooks = weakref.ref(needs[i]), weakref.ref(_private.hooks_of(needs[i]))

    for i in sorted(frozenset[int]().union(*used.values()) & needs.keys()):
        note(i)
    for i in sorted(used.keys() & needs.keys()):
        check(i)


def _is_read(feature: Tensor | None, hooks: Mapping[int, Any] | None) -> bool:
    """Whether somebody reads a feature's gradient in the backward pass that runs now.

    Args:
        feature: None if nobody holds it any more; its hooks may still be called.
    """
    is_hooked = any(not str(hook.__module__).startswith(_NOT_THE_USER) for hook in (hooks or {}).values())
    return is_hooked or (feature is not None and (feature.retains_grad or not _private.goes_on(feature)))
