"""Executing a plan through Inductor: its private interface that this needs (checked with torch 2.13).

Inductor asks for a partition of the joint graph after its own passes over it, in which operators are decomposed and
random numbers are drawn from seeds; each seed is drawn once. It then fuses calls, so that the memory it needs
is not quite the plan's.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch._inductor.config
from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils._python_dispatch import _disable_current_modes

from remat.torch.capture import Partition


def inductor(graph: fx.GraphModule, example_inputs: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """A backend that has Inductor compile both halves."""
    with torch._inductor.config.patch(custom_partitioner_fn=_Partitioner(partition)):
        return compile_fx(graph, list(example_inputs))  # pyright: ignore[reportReturnType]


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Partition):
        self.partition = partition

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
        with _disable_current_modes():
            return self.partition(gm, kwargs["num_fwd_outputs"])

    def __deepcopy__(self, memo: Any) -> _Partitioner:  # Inductor copies its settings
        return self

    def uuid(self) -> str:
        """A new one each time: what is compiled depends on the plan, so nothing of Inductor's caches may be reused."""
        return uuid.uuid4().hex
