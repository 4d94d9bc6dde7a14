"""Tensors without contents: a pass over rules learns from them which shapes a function makes."""

from __future__ import annotations

from torch import Tensor

from remat.torch._private import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta
