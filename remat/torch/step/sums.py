"""A warning where gradients are added in another order than eager mode's.

A weight that a module uses twice gets a sum as its gradient from each call. Where one backward pass goes through two
calls, eager mode adds the four terms one by one; here are two sums, whose sum may differ in its last bit. Under
autocast, eager mode adds gradients of the weight's one cast in half precision; here each call has a cast of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from remat.errors import warn
from remat.torch.internals import autograd
from remat.torch.step.capture import TrainingGraph


class Sums:
    """The parameters and arguments of a module whose gradients a call adds up, and the backward passes through it."""

    def __init__(self) -> None:
        self.names = list[str]()
        self._last_pass = -1
        self._has_warned = False

    def note(self, training_graph: TrainingGraph, model: nn.Module) -> None:
        """Note the parameters of a captured step."""
        gradients = training_graph.outputs[training_graph.n_forward_outputs :]
        pairs = zip(training_graph.primals, gradients, strict=True)
        summed = {id(x) for x, gradient in pairs if gradient is not None and _is_added_up(gradient)}
        names = {id(p): f"'{name}'" for name, p in model.named_parameters()}
        found = [
            *(name for i, name in names.items() if i in summed),
            *(["an argument"] if summed - names.keys() else []),
        ]
        self.names += [name for name in found if name not in self.names]

    def watch(self, node: Any) -> None:
        """Note backward passes through a call, given by its node in the autograd graph."""
        if self.names and not self._has_warned:
            node.register_prehook(self._note_pass)

    def _note_pass(self, _gradients: Any) -> None:
        this_pass, last_pass = autograd.backward_pass(), self._last_pass
        self._last_pass = this_pass
        if this_pass == last_pass and not self._has_warned:
            self._has_warned = True
            more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
            warn(
                "one backward pass goes through two calls of the module: gradients of "
                f"{self.names[0]}{more} are added in another order than PyTorch's, so that last bits may differ"
            )


def _is_added_up(gradient: fx.Node) -> bool:
    """Whether a gradient is a sum, or was cast."""
    if gradient.target is not torch.ops.aten._to_copy.default:
        return gradient.target is torch.ops.aten.add.Tensor
    return gradient.all_input_nodes[0].meta["val"].dtype != gradient.meta["val"].dtype
