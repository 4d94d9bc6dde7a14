"""Tensors without contents, of which a rule pass learns what shapes a function makes."""

from __future__ import annotations

from torch import Tensor

from remat.torch._private import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta
