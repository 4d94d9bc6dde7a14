"""How random modules are trained: the loss outside of them, hooks, and several calls or backward passes.

`loop_of` draws a loop for a module from its seed. Its names tell what it does, so that a seed says what it found.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

LossOf = Callable[[Any], Tensor]


@dataclass(frozen=True)
class Loop:
    """What is done with a module in a step.

    Attributes:
        loss: name of the loss.
        of: (outputs) -> the scalar that is differentiated.
        is_given: whether remat is told the loss.
        holds: whether the loop keeps the outputs in a variable.
        backward_passes: through each forward pass.
        retain_is_told: whether remat is told that there are several.
        calls: of the module before the backward pass.
        hooks: names of `HOOKS` on the module and its parameters.
        keeps_gradients: whether the gradients of outputs are kept (`Tensor.retain_grad`).
    """

    loss: str
    of: LossOf
    is_given: bool = False
    holds: bool = True
    backward_passes: int = 1
    retain_is_told: bool = False
    calls: int = 1
    hooks: tuple[str, ...] = ()
    keeps_gradients: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What is not the usual loop, for people."""
        told = {
            f"{self.loss}{' given' if self.is_given else ''}": True, "not_held": not self.holds,
            f"{self.backward_passes}_backward{'_told' if self.retain_is_told else ''}": self.backward_passes > 1,
            f"{self.calls}_calls": self.calls > 1, "retain_grad": self.keeps_gradients,
        }  # fmt: skip
        return (*(name for name, is_so in told.items() if is_so), *self.hooks)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `rematerialize`."""
        given = {"loss": self.of} if self.is_given else {}
        return given | ({"retain_graph": True} if self.retain_is_told else {})

    @property
    def is_counted(self) -> bool:
        """Whether the promise is for this loop: a second call before the backward pass, and gradients of outputs that
        are kept, come on top."""
        return self.calls == 1 and not self.keeps_gradients

    @property
    def is_exact(self) -> bool:
        """Whether the promise is the peak, and not only a bound."""
        return self.is_given and self.holds and self.backward_passes == 1

    def run(self, model: nn.Module, args: Any, kwargs: Any, context: AbstractContextManager[Any]) -> tuple[Any, Tensor]:
        """A forward and backward pass; returns (outputs of the last call, loss)."""
        with context:
            outputs = None
            if self.holds or self.keeps_gradients or self.calls > 1:
                loss = torch.zeros(())
                for i in range(self.calls):
                    outputs = model(*args, **kwargs)
                    if self.keeps_gradients:
                        for x in differentiable(outputs):
                            x.retain_grad()
                    loss = self.of(outputs) if self.calls == 1 else loss + (i + 1) * self.of(outputs).float()
            else:
                loss = self.of(model(*args, **kwargs))
        for _ in range(self.backward_passes - 1):
            loss.backward(retain_graph=True)
        loss.backward()
        return outputs, loss


def differentiable(outputs: Any) -> list[Tensor]:
    return [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]


def squares(outputs: Any) -> Tensor:
    """A scalar of everything that has a gradient."""
    found = differentiable(outputs)
    if len(found) == 1 and found[0].numel() == 1:
        return found[0].reshape(())
    return torch.stack([_Square.apply(x) * (1 + 0.1 * i) for i, x in enumerate(found)]).sum()  # pyright: ignore[reportArgumentType, reportOptionalOperand]


class _Square(torch.autograd.Function):
    """The mean square, with a gradient in the memory layout of what it is of."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.double().square().mean().float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return x * (gradient * 2 / x.numel()).to(x.dtype)


# Losses of one output: (random numbers, an output like that) -> the loss of an output


def _numbers(x: Tensor) -> Tensor:
    return torch.randn(x.shape, dtype=x.dtype)


def _shares(x: Tensor) -> Tensor:
    return torch.softmax(torch.randn(x.shape), -1).to(x.dtype)


def _rows(x: Tensor) -> Tensor:
    """Classes last; an image has them at 1."""
    return x.flatten(0, -2) if x.dim() == 3 else x


def _cross_entropy(x: Tensor, **options: Any) -> LossOf:
    classes = x.shape[1] if x.dim() == 4 else x.shape[-1]
    labels = torch.randint(0, classes, (_rows(x).shape[0], *x.shape[2:]) if x.dim() == 4 else (_rows(x).shape[0],))
    return lambda y: F.cross_entropy(_rows(y), labels, **options)


def _elementwise(function: Callable[..., Tensor], target: Callable[[Tensor], Tensor]) -> Callable[[Tensor], LossOf]:
    def made(x: Tensor) -> LossOf:
        wanted = target(x)
        return lambda y: function(y, wanted)

    return made


def _divergence(x: Tensor) -> LossOf:
    wanted = _shares(x)
    return lambda y: F.kl_div(F.log_softmax(y, -1), wanted, reduction="batchmean")


def _connectionist(x: Tensor) -> LossOf:
    """CTC, of (batch, steps, classes)."""
    batch, steps, classes = x.shape
    labels = torch.randint(1, classes, (batch, 2))
    lengths = torch.full((batch,), steps), torch.full((batch,), 2)
    return lambda y: F.ctc_loss(F.log_softmax(y.float(), -1).transpose(0, 1), labels, *lengths, zero_infinity=True)


def _of_floats(loss: LossOf) -> LossOf:
    return lambda y: loss(y.float())


ASSUMED: dict[str, Callable[[Tensor], LossOf]] = {
    "cross_entropy": _cross_entropy, "mse": _elementwise(F.mse_loss, _numbers),
    "smooth_l1": _elementwise(F.smooth_l1_loss, _numbers),
    "bce": _elementwise(F.binary_cross_entropy_with_logits, lambda x: (torch.rand(x.shape) > 0.5).to(x.dtype)),
}  # fmt: skip
OTHERS: dict[str, Callable[[Tensor], LossOf]] = {
    "l1": _elementwise(F.l1_loss, _numbers), "huber": _elementwise(F.huber_loss, _numbers), "kl": _divergence,
    "soft_targets": _elementwise(F.cross_entropy, _shares),
    "smoothed": lambda x: _cross_entropy(x, label_smoothing=0.1), "square": lambda _: lambda y: y.square().mean(),
    "float_entropy": lambda x: _of_floats(_cross_entropy(x)), "ctc": _connectionist,
    "sum": lambda _: torch.sum,
}  # fmt: skip


def _loss(rng: random.Random, outputs: Any) -> tuple[str, LossOf, bool]:
    """(name, loss, whether remat assumes as much without being told)."""
    found = differentiable(outputs)
    # A gradient in another layout than the output's may change the last bits, as the guide says.
    alike = all(x.is_contiguous() for x in found)
    usable = [i for i, x in enumerate(found) if alike and 2 <= x.dim() <= 4 and x.shape[-1] > 1]
    name = rng.choice(["squares", *ASSUMED, *ASSUMED, *OTHERS])
    if (len(found) == 1 and found[0].numel() == 1) or name == "squares" or not usable:
        return "squares", squares, all(x.numel() == 1 for x in found)
    at, rest = rng.choice(usable), rng.random() < 0.3
    if name == "ctc" and found[at].dim() != 3:
        name = "cross_entropy"
    of = (ASSUMED | OTHERS)[name](found[at].detach())

    def loss(outputs: Any) -> Tensor:
        every = differentiable(outputs)
        value = of(every[at])
        return value + squares([x for i, x in enumerate(every) if i != at]) if rest and len(every) > 1 else value

    is_half = found[at].element_size() < torch.float32.itemsize
    return name, loss, name in ASSUMED and not (rest and len(found) > 1) and not (is_half and name != "cross_entropy")


# Hooks: (module) -> None; they change what they see, so that their being called makes a difference

HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward_hook": lambda m: _part(m).register_forward_hook(lambda _m, _args, y: y * 0.9),
    "forward_pre_hook": lambda m: _part(m).register_forward_pre_hook(lambda _m, args: (args[0] * 1.1, *args[1:])),
    "full_backward_hook": lambda m: _part(m).register_full_backward_hook(
        lambda _m, given, _made: tuple(None if g is None else g * 0.5 for g in given)
    ),
    "full_backward_pre_hook": lambda m: _part(m).register_full_backward_pre_hook(
        lambda _m, given: tuple(None if g is None else g * 0.5 for g in given)
    ),
    "hook_of_module": lambda m: m.register_forward_hook(lambda _m, _args, y: y),
    "parameter_hook": lambda m: [p.register_hook(lambda g: g * 0.5) for p in _trained(m)][:1],
    "accumulated_hook": lambda m: [
        p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5)) for p in [*_trained(m)][:2]
    ],
}


def _part(model: Any) -> nn.Module:
    return model.parts[len(model.parts) // 2]


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    return (p for p in model.parameters() if p.requires_grad)


def attach(model: nn.Module, hooks: tuple[str, ...]) -> None:
    for name in hooks:
        HOOKS[name](model)


def loop_of(seed: int, outputs: Any) -> Loop:
    """The loop of a seed, for a module that returns such outputs."""
    rng = random.Random(f"loop {seed}")
    name, of, is_assumed = _loss(rng, outputs)
    is_given = not is_assumed or rng.random() < 0.4
    holds, twice = rng.random() < 0.7, rng.random() < 0.15
    hooks = tuple(rng.sample(sorted(HOOKS), rng.choice([1, 1, 2]))) if rng.random() < 0.15 else ()
    several = len(differentiable(outputs)) > 1
    return Loop(
        name, of, is_given, holds, 2 if twice else 1, twice and rng.random() < 0.6, 2 if rng.random() < 0.08 else 1,
        hooks, several and rng.random() < 0.15,
    )  # fmt: skip
