"""A warning where gradients are added in another order than eager mode's.

A weight that a module uses twice gets a sum as its gradient from each call. Where one backward pass goes through two
calls, eager mode adds the four terms one by one; here are two sums, whose sum may differ in its last bit. The same is
true of a call and a penalty on the weight outside of it. Under autocast, eager mode adds gradients of the weight's one
cast in half precision; here each call has a cast of its own.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.errors import warn
from remat.torch.internals import autograd
from remat.torch.step.aot import made_last
from remat.torch.step.capture import TrainingGraph

aten = torch.ops.aten


class Sums:
    """The parameters and arguments of a module whose gradients a call adds up, and the backward passes through it."""

    def __init__(self) -> None:
        self.names = list[str]()
        self._added = dict[int, str]()  # [id of a parameter whose gradient is a sum] its name
        self._last_pass = -1
        self._has_warned = False

    def note(self, training_graph: TrainingGraph, model: nn.Module) -> None:
        """Note the parameters of a captured step."""
        gradients = training_graph.outputs[training_graph.n_forward_outputs :]
        pairs = [*zip(training_graph.primals, gradients, strict=True)]
        summed = {id(x) for x, gradient in pairs if gradient is not None and _is_added_up(gradient)}
        names = {id(p): f"'{name}'" for name, p in model.named_parameters()}
        found = [
            *(name for i, name in names.items() if i in summed),
            *(["an argument"] if summed - names.keys() else []),
        ]
        self.names += [name for name in found if name not in self.names]
        added = (id(x) for x, gradient in pairs if gradient is not None and _is_sum(gradient))
        self._added |= {i: names[i] for i in added if i in names}

    def watch(self, node: Any) -> None:
        """Note backward passes through a call, given by its node in the autograd graph."""
        if self.names and not self._has_warned:
            node.register_prehook(self._note_pass)
            for leaf, _ in node.next_functions:
                if id(getattr(leaf, "variable", None)) in self._added:
                    self._watch_leaf(leaf)

    def _note_pass(self, _gradients: Any) -> None:
        this_pass, last_pass = autograd.backward_pass(), self._last_pass
        self._last_pass = this_pass
        made_last.gradients = set()  # the half that runs next fills it
        if this_pass == last_pass:
            more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
            self._warn(f"one backward pass goes through two calls of the module: gradients of {self.names[0]}{more}")

    def _watch_leaf(self, leaf: Any) -> None:
        """Let a parameter's node look whether its gradient is one that a backward half has made.

        No hook of the backward half tells that: with such a hook the engine holds the gradients of outputs.
        """
        parameter = leaf.variable  # the hook does not hold the node, which holds the hook

        def look(gradients: tuple[Tensor | None, ...]) -> None:
            handle.remove()  # another module may keep the leaf's node for ever
            made = made_last.__dict__.get("gradients")  # empty by another runner
            is_sum = any(x is not None and autograd.identity(x) not in made for x in gradients) if made else False
            if is_sum and not autograd.hooks_of(parameter):
                name = self._added[id(parameter)]
                self._warn(f"the loss reads {name} outside of the module, too: gradients of it")

        handle = leaf.register_prehook(look)

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"{text} are added in another order than PyTorch's, so that last bits may differ")


def _is_added_up(gradient: fx.Node) -> bool:
    """Whether a gradient is a sum, or was cast."""
    if gradient.target is not aten._to_copy.default:
        return _is_sum(gradient)
    return gradient.all_input_nodes[0].meta["val"].dtype != gradient.meta["val"].dtype


def _is_sum(gradient: fx.Node) -> bool:
    """Whether a gradient is a sum, of calls or, in a recurrent layer, of steps."""
    if gradient.target is operator.getitem:
        return gradient.all_input_nodes[0].target is torch.ops.remat.recurrent_backward.default
    return gradient.target is aten.add.Tensor
