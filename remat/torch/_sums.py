"""A warning where gradients are added in another order than eager mode's.

A weight that a module uses twice gets a sum as its gradient from each call. Where one backward pass goes through two
calls, eager mode adds the four terms one by one; here are two sums, whose sum may differ in its last bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from remat.errors import warn
from remat.torch import _private
from remat.torch.capture import TrainingGraph


class Sums:
    """The parameters of a module whose gradients a call adds up, and the backward passes through its calls."""

    def __init__(self) -> None:
        self.names = list[str]()
        self._last_pass = -1
        self._has_warned = False

    def note(self, training_graph: TrainingGraph, model: nn.Module) -> None:
        """Note the parameters of a captured step."""
        gradients = training_graph.outputs[training_graph.n_forward_outputs :]
        pairs = zip(training_graph.primals, gradients, strict=True)
        summed = {id(x) for x, gradient in pairs if gradient and gradient.target is torch.ops.aten.add.Tensor}
        self.names += [name for name, p in model.named_parameters() if id(p) in summed and name not in self.names]

    def watch(self, node: Any) -> None:
        """Note backward passes through a call, given by its node in the autograd graph."""
        if self.names and not self._has_warned:
            node.register_prehook(self._note_pass)

    def _note_pass(self, _gradients: Any) -> None:
        this_pass, last_pass = _private.backward_pass(), self._last_pass
        self._last_pass = this_pass
        if this_pass == last_pass and not self._has_warned:
            self._has_warned = True
            more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
            warn(
                "one backward pass goes through two calls of the module, each with several uses of "
                f"'{self.names[0]}'{more}: PyTorch adds these gradients in another order, so that last bits may differ"
            )
