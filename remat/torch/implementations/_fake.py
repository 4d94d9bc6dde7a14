"""Tensors without contents, of which a rule pass learns what shapes a function makes (checked with torch 2.13)."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(tensor: Tensor) -> bool:
    return isinstance(tensor, FakeTensor) or tensor.is_meta
