"""Draws as eager mode makes them where functional operators draw otherwise."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("remat", "FRAGMENT")
_library.define("bernoulli_like(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def _bernoulli_like(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(p)


def _like(x: Tensor, _p: float) -> Tensor:
    return torch.empty_like(x)


for key in ("CPU", "CUDA"):
    _library.impl("bernoulli_like", _bernoulli_like, key)
torch.library.register_fake("remat::bernoulli_like", _like, lib=_library)

# Zeros and ones in the layout of `x`. `aten.bernoulli.p`, which stands for `bernoulli_` in functional graphs, fills a
# contiguous tensor instead: on another layout the same numbers land elsewhere.
bernoulli_like = torch.ops.remat.bernoulli_like.default
