"""Models, sample inputs and losses for extraction, without memory or initialisation where possible."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.errors import InvalidInput, first_line, unknown_name
from remat.frontends.spec import DTYPES, ModelSpec, check_options
from remat.torch.internals.autograd import module_tensors
from remat.torch.internals.operators import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    tree_map,
)
from remat.torch.step.refusals import check_sample_args
from remat.torch.step.state import replaced_tensors

LOSSES = ("mean", "cross_entropy", "bce")

Loss = Callable[..., Tensor]


def build(
    spec: ModelSpec, factory: Callable[..., Any], device: str = "meta"
) -> tuple[nn.Module, tuple[Any, ...], Loss | str | None]:
    """(model, sample arguments, loss) of a spec's factory; see `remat.torch.frontend.graphs.extract`.

    Args:
        device: where arguments are, and where parameters are made and initialised. On ``meta`` parameters are neither:
            tensors get addresses on the CPU but no memory, because nothing is ever written to them.
    """
    if spec.dtype is not None and spec.dtype not in DTYPES:
        raise unknown_name("dtype", spec.dtype, DTYPES)
    options = dict(spec.options)
    loss = options.pop("loss", None)
    parameters = inspect.signature(factory).parameters
    offered = {"batch_size": spec.batch_size, "input_size": tuple(spec.input_size)}
    options = {key: value for key, value in offered.items() if key in parameters and value} | options
    check_options(spec, factory, options)
    try:
        with torch.device(device):
            made = factory(**options)
    except InvalidInput:
        raise
    except (RuntimeError, NotImplementedError):  # building it needs real numbers, e.g. for .item()
        made = factory(**options)
    model, args, made_loss = _unpack(made, spec)
    dtype = None if spec.dtype is None else getattr(torch, spec.dtype)
    model = model if dtype is None else model.to(dtype)
    if device == "meta":
        _materialize(model)
    args = tuple(tree_map(lambda x: _input(x, dtype, device), a) for a in args)
    return model, args, made_loss if loss is None else loss


def loss_step(
    model: nn.Module, args: tuple[Any, ...], loss_fn: Loss | str | None, autocast: torch.dtype | None = None
) -> tuple[Step, tuple[Any, ...]]:
    """A module that computes the loss, and its arguments: those of the model, then the targets.

    Args:
        autocast: type of matrix products in model and loss.
    """
    check_sample_args(args)
    if callable(loss_fn):
        return Step(model, loss_fn, len(args), autocast), args
    if loss_fn is not None and loss_fn not in LOSSES:
        raise unknown_name("loss", loss_fn, LOSSES)
    output = output_of(model, args)
    if loss_fn is None:
        loss_fn = "itself" if output.ndim == 0 else "cross_entropy" if output.ndim == 2 else "mean"
    if loss_fn == "cross_entropy":
        if output.ndim < 2:
            raise InvalidInput(f"cross_entropy needs an output (batch, classes, ...), not {tuple(output.shape)}")
        shape = (output.shape[0], *output.shape[2:])
        target = torch.zeros(shape, dtype=torch.long, device=output.device)
        return Step(model, F.cross_entropy, len(args), autocast), (*args, target)
    if loss_fn == "bce":
        target = torch.empty(output.shape, dtype=output.dtype, device=output.device)
        return Step(model, F.binary_cross_entropy_with_logits, len(args), autocast), (*args, target)
    return Step(model, torch.mean if loss_fn == "mean" else _itself, len(args), autocast), args


class Step(nn.Module):
    """The loss of a model's output; the loss function gets the arguments that follow the model's.

    Attributes:
        loss_fn: another step of the model takes it as `loss_step`'s, if it reads no targets.
    """

    def __init__(self, model: nn.Module, loss_fn: Loss, n_args: int, autocast: torch.dtype | None):
        super().__init__()
        self.model, self.loss_fn, self.n_args, self.autocast = model, loss_fn, n_args, autocast

    def forward(self, *args: Any) -> Tensor:
        if self.autocast is None:
            return self._loss(*args)
        with torch.autocast("cpu", self.autocast):
            return self._loss(*args)

    def _loss(self, *args: Any) -> Tensor:
        output = self.model(*args[: self.n_args])
        if self.n_args < len(args) or self.loss_fn in (torch.mean, _itself):
            output = _first_tensor(output)
        return self.loss_fn(output, *args[self.n_args :])


def _itself(output: Tensor) -> Tensor:
    return output


def _first_tensor(output: Any) -> Tensor:
    """The tensor that the default losses read: the output's loss if it has one, else its first tensor."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict):
        return output["loss"] if output.get("loss") is not None else next(iter(output.values()))
    return _first_tensor(output[0])


def output_of(model: nn.Module, args: tuple[Any, ...]) -> Tensor:
    """The model's output as a fake tensor; nothing is computed and the model does not change."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, args)
    try:
        # Replace the buffers, because under the mode alone an in-place update of a real buffer is real.
        with replaced_tensors(model, mode.from_tensor), mode, torch.no_grad():
            return _first_tensor(model(*fake))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InvalidInput(
            f"the model looks at values ({error}): control flow and shapes must not depend on them"
        ) from error
    except Exception as error:
        shapes = ", ".join(str(list(x.shape)) for x in args if isinstance(x, Tensor))
        raise InvalidInput(
            f"the model does not accept its sample input of shape {shapes}: {first_line(error)}"
        ) from error


def _unpack(made: Any, spec: ModelSpec) -> tuple[nn.Module, tuple[Any, ...], Loss | str | None]:
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3 or not isinstance(parts[0], nn.Module):
        raise InvalidInput(
            f"target '{spec.target}' must return a module, (module, sample_args) or (module, sample_args, loss_fn)"
        )
    if len(parts) == 1:
        if not spec.input_size:
            raise InvalidInput(f"target '{spec.target}' returns a module alone; give input_size, e.g. [3,224,224]")
        dtype = next((p.dtype for p in parts[0].parameters() if p.is_floating_point()), torch.float32)
        return parts[0], (torch.empty(spec.batch_size, *spec.input_size, dtype=dtype),), None
    if not isinstance(parts[1], tuple):
        raise InvalidInput(f"target '{spec.target}': sample_args must be a tuple")
    return parts[0], parts[1], parts[2] if len(parts) == 3 else None


def _input(x: Any, dtype: torch.dtype | None, device: str) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = x.to(dtype) if dtype is not None and x.is_floating_point() else x
    if x.is_meta:
        return _real(x)
    return x if device == "meta" else x.to(device)


def _real(x: Tensor) -> Tensor:
    """A tensor of the same layout on the CPU; it takes no memory, because its pages are never touched."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")


def _materialize(model: nn.Module) -> None:
    """Give every meta tensor of the model an address on the CPU; tied parameters stay tied."""
    made: dict[int, Tensor] = {}

    def real(x: Tensor) -> Tensor:
        if id(x) not in made:
            y = _real(x)
            made[id(x)] = nn.Parameter(y, x.requires_grad) if isinstance(x, nn.Parameter) else y
        return made[id(x)]

    for module in model.modules():
        for tensors in (*module_tensors(module), module.__dict__):
            for key, x in list(tensors.items()):
                if isinstance(x, Tensor) and x.is_meta:
                    tensors[key] = real(x)  # pyright: ignore[reportArgumentType] - a parameter for a parameter
