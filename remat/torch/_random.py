"""Draws as eager mode makes them where functional operators draw otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_library = torch.library.Library("remat", "FRAGMENT")
_library.define("bernoulli_like(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "rrelu(Tensor x, float lower, float upper) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,)
)  # (result, what each element was multiplied by)


def _bernoulli_like(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(p)


def _like(x: Tensor, _p: float) -> Tensor:
    return torch.empty_like(x)


def _rrelu(x: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    return aten.rrelu_with_noise.default(x, noise, lower, upper, True), noise


def _fake_rrelu(x: Tensor, _lower: float, _upper: float) -> tuple[Tensor, Tensor]:
    made = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2)]
    return made[0], made[1]


def _remember_noise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.lower, ctx.upper = inputs
    ctx.is_noisy = ctx.upper - ctx.lower > 1e-6  # else eager mode looks at the input
    ctx.save_for_backward(output[1] if ctx.is_noisy else x)
    ctx.mark_non_differentiable(output[1])


def _differentiate_rrelu(ctx: Any, gradient: Tensor, _of_noise: Any) -> Any:
    (saved,) = ctx.saved_tensors
    if ctx.is_noisy:
        return saved.mul(gradient), None, None  # in the layout of the draws, as eager mode
    return aten.leaky_relu_backward.default(gradient, saved, (ctx.lower + ctx.upper) / 2, False), None, None


def bernoulli(x: Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    """`aten.bernoulli.p` as eager mode computes it: contiguous, whatever `x` is.

    Tracing makes the same of it as of `bernoulli_`, which fills `x` in its own layout.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(p, generator=generator)


def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """`aten.rrelu` as eager mode computes it: its result and its draws are contiguous, whatever `x` is."""
    if not training:
        return aten.leaky_relu.default(x, (lower + upper) / 2).contiguous()
    if x.device.type != "cpu" or generator is not None:
        noise = torch.empty_like(x, memory_format=torch.contiguous_format)
        return aten.rrelu_with_noise.default(x, noise, lower, upper, training, generator)
    return torch.ops.remat.rrelu.default(x, lower, upper)[0]


def rrelu_(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """`aten.rrelu_`: as `rrelu`, in the layout of `x`."""
    return x.copy_(rrelu(x, lower, upper, training, generator))


_library.impl("rrelu", _rrelu, "CPU")
torch.library.register_fake("remat::rrelu", _fake_rrelu, lib=_library)
torch.library.register_autograd("remat::rrelu", _differentiate_rrelu, setup_context=_remember_noise, lib=_library)
for key in ("CPU", "CUDA"):
    _library.impl("bernoulli_like", _bernoulli_like, key)
torch.library.register_fake("remat::bernoulli_like", _like, lib=_library)

# Zeros and ones in the layout of `x`. `aten.bernoulli.p`, which stands for `bernoulli_` in functional graphs, fills a
# contiguous tensor instead: on another layout the same numbers land elsewhere.
bernoulli_like = torch.ops.remat.bernoulli_like.default
