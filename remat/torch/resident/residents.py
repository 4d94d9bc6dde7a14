"""What is resident in a training step beside the step's own tensors, in bytes by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat.torch.resident import optimizer as _optimizer
from remat.torch.resident.shard import shard_of
from remat.torch.step.capture import TrainingGraph
from remat.torch.step.state import read_in_attributes

EARLIER_GRADIENTS = "gradients of earlier steps"
IN_ATTRIBUTES = "tensors in attributes"


@dataclass(slots=True)
class Resident:
    """The optimizer's state, gradients of earlier steps, and tensors that a step leaves in attributes.

    Attributes:
        model: whose parameters are trained; None: nothing is resident.
        optimizer: an object, a name, a size, or None for none.
        ranks: over which parameters are divided; None for one.
        accumulates: gradients of earlier steps are there while a step runs.
        part: of the model, whose own step is planned; what surrounds it is counted elsewhere.
        left_bytes: of the tensors that a step leaves in the model's attributes, until the next step has replaced them.
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | str | int | None = None
    ranks: int | None = None
    accumulates: bool = False
    part: nn.Module | None = None
    left_bytes: int = 0

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state, counted anew at each call: the set of trained parameters may change."""
        if self.model is None:
            return 0
        parameters = self.model.parameters()
        held: Any = parameters if self.ranks is None else [shard_of(p, self.ranks) for p in parameters]
        return _optimizer.state_bytes(self.optimizer, held)

    def bytes_beside(self, training_graph: TrainingGraph) -> dict[str, int]:
        """[name] bytes that are resident beside parameters, buffers and arguments of a step."""
        if self.model is None:
            return {}
        if self.part is not None:  # what the part itself left in its attributes does not count
            read = read_in_attributes(self.part, training_graph.primals)
            return {IN_ATTRIBUTES: -read} if read else {}
        earlier = _gradient_bytes(training_graph) if self.accumulates else 0
        left = 0
        if self.left_bytes:
            left = max(0, self.left_bytes - read_in_attributes(self.model, training_graph.primals))
        beside = {"optimizer state": self.state_bytes(), EARLIER_GRADIENTS: earlier}
        return beside | ({IN_ATTRIBUTES: left} if left else {})


def _gradient_bytes(training_graph: TrainingGraph) -> int:
    gradients = [n for n in training_graph.outputs[training_graph.n_forward_outputs :] if n is not None]
    return sum(n.meta["val"].untyped_storage().nbytes() for n in gradients)
