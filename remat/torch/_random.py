"""Random numbers: draws that follow eager mode where functional operators do not, and draws that are repeated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
_library = torch.library.Library("remat", "FRAGMENT")
_library.define("bernoulli_like(Tensor x, float p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_library.define(
    "rrelu(Tensor x, float lower, float upper) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,)
)  # (result, the factor of each element)


def _rrelu(x: Tensor, lower: float, upper: float) -> tuple[Tensor, Tensor]:
    noise = torch.empty_like(x, memory_format=torch.contiguous_format)
    return aten.rrelu_with_noise.default(x, noise, lower, upper, True), noise


def _fake_rrelu(x: Tensor, _lower: float, _upper: float) -> tuple[Tensor, Tensor]:
    result = torch.empty_like(x, memory_format=torch.contiguous_format)
    return result, torch.empty_like(result)


def _remember_noise(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.lower, ctx.upper = inputs
    ctx.is_noisy = ctx.upper - ctx.lower > 1e-6  # else eager mode differentiates by the input
    ctx.save_for_backward(output[1] if ctx.is_noisy else x)
    ctx.mark_non_differentiable(output[1])


def _differentiate_rrelu(ctx: Any, gradient: Tensor, _of_noise: Any) -> Any:
    (saved,) = ctx.saved_tensors
    if ctx.is_noisy:
        return saved.mul(gradient), None, None  # in the layout of the draws, as in eager mode
    return aten.leaky_relu_backward.default(gradient, saved, (ctx.lower + ctx.upper) / 2, False), None, None


def bernoulli(x: Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    """`aten.bernoulli.p` as eager mode computes it: contiguous for every layout of `x`.

    Tracing does not distinguish it from `bernoulli_`, which fills `x` in its own layout.
    """
    return torch.empty_like(x, memory_format=torch.contiguous_format).bernoulli_(p, generator=generator)


def rrelu(
    x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Tensor:
    """`aten.rrelu` as eager mode computes it: result and draws are contiguous for every layout of `x`."""
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
    _library.impl("bernoulli_like", lambda x, p: torch.empty_like(x).bernoulli_(p), key)
torch.library.register_fake("remat::bernoulli_like", lambda x, _: torch.empty_like(x), lib=_library)

# Zeros and ones in the layout of `x`. In functional graphs `aten.bernoulli.p` replaces `bernoulli_`, but fills a
# contiguous tensor: in another layout the same numbers would be other elements.
bernoulli_like = torch.ops.remat.bernoulli_like.default


def random_state(device: torch.device) -> Tensor:
    """The state of the default generator of a device, a CPU tensor of bytes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Give the default generator of a device the state that `random_state` returned."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def random_states() -> tuple[Tensor, list[Tensor]]:
    """The states of the CPU's default generator and of every GPU's, where GPUs are in use."""
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def set_random_states(states: tuple[Tensor, list[Tensor]]) -> None:
    """Put back the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    if states[1]:
        torch.cuda.set_rng_state_all(states[1])


def state_to_repeat(device: torch.device) -> Tensor:
    """A copy of `random_state` in memory that PyTorch's allocator does not count."""
    return torch.from_numpy(random_state(device).numpy().copy())


def with_random_state(state: Tensor, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Repeat a call with the draws that followed `state`; the generator keeps its present state."""
    asked = torch.device(kwargs.get("device") or "cpu")  # of a call without a tensor
    device = next((x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), asked)
    now = state_to_repeat(device)
    set_random_state(state, device)
    try:
        return target(*args, **kwargs)
    finally:
        set_random_state(now, device)


@functools.cache
def drawing_again(function: Callable[..., Any]) -> Callable[..., Any]:
    """`with_random_state` of one function; generated code could not name a function that is an argument."""

    def again(state: Tensor, *args: Any) -> Any:
        return with_random_state(state, function, *args)

    again.__name__ = again.__qualname__ = f"{function.__name__}_again"
    return again
