"""Tensors that a module returns or stores, and also uses: outside, their gradients are not those of the plain step.

The backward pass of a planned step is one node of the autograd graph, with all outputs as its results. What flows into
such a feature from another output stays inside of this node. Whoever reads the feature's gradient would get the rest
without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.hooks import unserializable_hook

from remat.errors import InvalidInput, warn
from remat.torch.internals import autograd, notes
from remat.torch.step.work import tensors_of, users_of

_NOT_THE_USER = ("remat.", "torch.distributed.")  # their hooks do not read the gradient
_REFUSED = (
    "a hook, retain_grad() or autograd.grad on a tensor that the module returns or stores, and also uses, would miss "
    "the gradient from inside of the planned step: use .model for that, or use the tensor outside of the module alone"
)
_INCOMPLETE = (
    "the module returns or stores a tensor that it also uses: torch.autograd.grad gives only the part from outside of "
    "the planned step; use .model for its whole gradient"
)
_OTHER_ORDER = (
    "the module returns several tensors with the same memory, and also uses them: PyTorch adds these gradients in "
    "another order, so that last bits may differ"
)


def used_features(graph: fx.GraphModule) -> dict[int, frozenset[int]]:
    """[index of an output of Dynamo's graph] other outputs through which gradients flow into it."""
    outputs: Any = graph.graph.find_nodes(op="output")[0].args[0]
    used = {}
    for i, feature in enumerate(outputs):
        if isinstance(feature, fx.Node) and feature.op != "placeholder":
            reached = users_of(feature, _needs_gradient)
            others = frozenset(j for j, x in enumerate(outputs) if x in reached)
            used |= {i: others} if others else {}
    return used


def _needs_gradient(node: fx.Node) -> bool:
    tensors = tensors_of(notes.example_of(node))
    return not tensors or any(x.requires_grad for x in tensors)


def detached_apart(graph: fx.GraphModule) -> Callable[[Callable[..., Sequence[Any]]], Callable[..., Sequence[Any]]]:
    """Take detached twins of other outputs out of Dynamo's graph; what is returned adds them to its compiled function.

    A module that returns a view ``h`` may store ``h.detach()``: AOT autograd (PyTorch 2.13) applies that view twice.
    """
    end = graph.graph.find_nodes(op="output")[0]
    outputs: Any = end.args[0]
    layouts = [_layout(x) if isinstance(x, fx.Node) else None for x in outputs]
    differentiable = {layout: i for i, layout in enumerate(layouts) if layout and _needs_gradient(outputs[i])}
    twin_of = {
        i: differentiable[layout]
        for i, layout in enumerate(layouts)
        if layout in differentiable and outputs[i].op != "placeholder" and not _needs_gradient(outputs[i])
    }
    if not twin_of:
        return lambda compiled: compiled
    end.args = (tuple(x for i, x in enumerate(outputs) if i not in twin_of),)
    graph.recompile()

    def with_detached(compiled: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def both(*args: Any) -> Sequence[Any]:
            made = iter(compiled(*args))
            found: list[Any] = [None if i in twin_of else next(made) for i in range(len(layouts))]
            return [found[twin_of[i]].detach() if i in twin_of else x for i, x in enumerate(found)]

        return both

    return with_detached


def _layout(node: fx.Node) -> tuple[Any, ...] | None:
    """Where in memory a tensor is; None of other values, and of tensors whose size depends on values."""
    x = notes.example_of(node)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        return None
    place = *x.shape, *x.stride(), x.storage_offset()
    if not all(isinstance(n, int) for n in place):
        return None
    return autograd.storage_key(x), x.dtype, place, x.is_conj(), x.is_neg()


class Watched:
    """A compiled step of Dynamo's graph that refuses to give a part of a feature's gradient.

    Where it cannot tell for certain, it warns, once.

    Args:
        used: as `used_features` gives it.
    """

    def __init__(self, step: Callable[..., Sequence[Any]], used: Mapping[int, frozenset[int]]):
        self.step, self.used = step, used
        self._warned = set[str]()

    def __call__(self, *args: Any) -> Sequence[Any]:
        outputs, given = self.step(*args), set(map(id, args))  # the gradient of an argument is complete
        needs = {i: x for i, x in enumerate(outputs) if isinstance(x, Tensor) and x.requires_grad}
        self._watch({i: x for i, x in needs.items() if id(x) not in given})
        return outputs

    def _watch(self, needs: Mapping[int, Tensor]) -> None:
        """Let the backward pass look whether somebody reads the gradient of a feature."""
        used = {i: others for i, others in self.used.items() if i in needs}
        passes: dict[int, int] = {}  # output -> the last backward pass that brought it a gradient
        alike = _with_same_memory(needs)
        for i in sorted((frozenset[int]().union(*used.values(), *alike.values())) & needs.keys()):
            _note(i, needs[i], passes)
        for i in used:
            self._check(i, needs[i], passes)
        for i, others in alike.items():
            # Eager mode adds the gradients of these and those from inside one by one, a planned step the former first.
            if frozenset[int]().union(*(used.get(j, ()) for j in (i, *others))) - others - {i}:
                self._check_order(needs[i], others, passes)
            for j in used.get(i, frozenset()) & others:  # into which gradients flow from the base, not from `i`
                _check_passed_over(needs[i], needs[j])

    def _check(self, i: int, x: Tensor, passes: Mapping[int, int]) -> None:
        @unserializable_hook
        def refuse(_gradient: Tensor | None) -> None:
            if is_incomplete() and _is_read(feature(), hooks()):
                raise InvalidInput(_REFUSED)

        @unserializable_hook
        def look(gradients: tuple[Tensor | None, ...]) -> None:
            y = feature()
            if y is None or autograd.adds_to_a_leaf(y):  # nobody asks for a gradient
                return
            if is_incomplete() and autograd.is_captured(gradients, at):
                self._warn(_INCOMPLETE)

        def is_incomplete() -> bool:
            return any(passes.get(j) == autograd.backward_pass() for j in self.used[i])

        x.register_hook(refuse)
        feature, hooks, at = weakref.ref(x), weakref.ref(autograd.hooks_of(x)), x.output_nr
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(look)

    def _check_order(self, x: Tensor, others: frozenset[int], passes: Mapping[int, int]) -> None:
        @unserializable_hook
        def hook(gradient: Tensor | None) -> None:
            if gradient is not None and any(passes.get(j) == autograd.backward_pass() for j in others):
                self._warn(_OTHER_ORDER)

        x.register_hook(hook)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warn(text)


def _note(i: int, x: Tensor, passes: dict[int, int]) -> None:
    """Note the backward passes that bring output `i` a gradient."""

    @unserializable_hook
    def hook(gradient: Tensor | None) -> None:
        if gradient is not None:
            passes[i] = autograd.backward_pass()

    x.register_hook(hook)


def _check_passed_over(feature: Tensor, made: Tensor) -> None:
    """Let the backward pass from what was made of a feature look whether somebody reads the feature's gradient."""

    @unserializable_hook
    def hook(gradient: Tensor | None) -> None:
        x, y = read(), differentiated()
        if gradient is not None and y is not None and autograd.goes_on(y) and _is_hooked(x, hooks()):
            raise InvalidInput(_REFUSED)

    made.register_hook(hook)
    read, differentiated, hooks = weakref.ref(feature), weakref.ref(made), weakref.ref(autograd.hooks_of(feature))


def _with_same_memory(needs: Mapping[int, Tensor]) -> dict[int, frozenset[int]]:
    """[output] other outputs that are views of the same tensor; those that have none are left out."""
    bases: dict[int, set[int]] = {}
    for i, x in needs.items():
        viewed = autograd.base_of(x)
        bases.setdefault(id(x if viewed is None else viewed), set()).add(i)
    return {i: frozenset(same - {i}) for same in bases.values() if len(same) > 1 for i in same}


def _is_read(feature: Tensor | None, hooks: Mapping[int, Any] | None) -> bool:
    """Whether somebody reads a feature's gradient in the backward pass that runs now.

    Args:
        feature: None if nobody holds it any more; its hooks may still be called.
    """
    return _is_hooked(feature, hooks) or (feature is not None and not autograd.goes_on(feature))


def _is_hooked(feature: Tensor | None, hooks: Mapping[int, Any] | None) -> bool:
    is_hooked = any(not str(hook.__module__).startswith(_NOT_THE_USER) for hook in (hooks or {}).values())
    return is_hooked or (feature is not None and feature.retains_grad)
