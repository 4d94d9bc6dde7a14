"""The module that `rematerialize` returns: the model's own parameters, executed under a plan."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from remat.errors import InvalidInput, warn
from remat.execution import Planned, StepPlan
from remat.torch.following.in_one_graph import Following
from remat.torch.internals import autograd
from remat.torch.internals.autograd import load_own_state, share_tables, storage_key
from remat.torch.internals.dynamo import leave_alone
from remat.torch.planning.capturing import keywords, with_storages
from remat.torch.planning.planner import Planner
from remat.torch.resident import optimizer
from remat.torch.resident.in_backward import Given
from remat.torch.step.work import local_part
from remat.units import format_size

COMPILES_ITSELF = "a rematerialized module compiles its own steps: leave it out of torch.compile, or fullgraph=True out"


class Rematerialized(Planned, nn.Module):
    """A model whose training steps follow a plan; in every other respect the model itself.

    Parameters, buffers, submodules and `state_dict` are the model's own objects under its own names. The model answers
    for all other attributes. Without gradients (``torch.no_grad()``) the plain model runs. A step with other shapes (a
    smaller last batch) or another mode is captured and planned when it first occurs, or before, by `prepare`.

    Attributes:
        model: the plain model.
        plan: of a step on the sample arguments; ``print`` it, ``plan.save(path)`` it.
        measured_peak_bytes: of that step, if it was verified; it counts the same things as `predicted_peak_bytes`.
    """

    plan: StepPlan
    measured_peak_bytes: int | None
    _step: Following
    _planner: Planner

    def __init__(self, following: Following, plan: StepPlan, accumulates: bool = False):
        super().__init__()
        model, planner = following.model, following.planner
        share_tables(self, model)
        self.__dict__.update(
            model=model, plan=plan, training=model.training, measured_peak_bytes=None,
            _step=following, _planner=planner,
            _accumulates=accumulates,  # set too once a step finds gradients of an earlier one
            forward=_signed(weakref.WeakMethod(self._forward), model),
        )  # fmt: skip
        self.__dict__.update((name, _forwarded(self, name)) for name in _overridden(type(model)))
        optimizer.watch(self, planner.resident.state_bytes)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride] - `type(self)` tells the truth
        """The model's class, so that trainers and savers treat the module as they treat the model."""
        return type(self.__dict__.get("model", self))

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:  # of `nn.Module`: what ``model(...)`` runs
        """Without hooks of its own the module is no step of its own to hooks for all modules: they see the model."""
        return super()._call_impl(*args, **kwargs) if autograd.has_own_hooks(self) else self.forward(*args, **kwargs)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        self._planner.backend.updates.check()
        parameters = autograd.parameters_of(self.model)
        if not self._accumulates:
            self._warn_of_held_gradients(parameters)
        return self._step(args, kwargs, parameters)

    def prepare(
        self,
        *sample_args: tuple[Any, ...] | list[tuple[Any, ...]],
        sample_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[StepPlan, ...]:
        """Plan steps on other arguments before they occur, so that a loop does not pause to plan them.

        Steps are planned for the mode (train or eval) and the autocast in force now, within the same budget in bytes.
        A step that fits without recomputation takes seconds; others take up to `time_limit_s` each.

        Args:
            sample_args: for each step a tuple of the model's positional arguments, or one list of such tuples; only
                shapes and dtypes matter, so that tensors on ``meta`` suffice.
            sample_kwargs: keyword arguments of the model, for all of these steps.

        Returns:
            A plan for each step.

        Raises:
            InvalidInput: no plan within the budget was found, or the model does not compile for these arguments.
        """
        planner, plans = self._planner, []
        steps = sample_args[0] if len(sample_args) == 1 and isinstance(sample_args[0], list) else sample_args
        if not steps or not all(isinstance(args, tuple) for args in steps):
            raise InvalidInput("prepare takes tuples of the model's positional arguments, e.g. prepare((x,), (y,))")
        for args in steps:
            plans += self._step.plans_for(*with_storages((args, keywords(sample_kwargs)), planner.device))
        return tuple(plans)

    def _warn_of_held_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Warn, once, if gradients that the budget does not count are still held when a step begins."""
        held = [gradient for p in parameters if (gradient := p.grad) is not None]
        if not held:
            return
        gradients = (local_part(x) for x in held if not isinstance(x, Given))
        sizes = {storage_key(x): x.untyped_storage().nbytes() for x in gradients}  # DDP's are views of buckets
        held = sum(sizes.values())
        if held:
            self._accumulates = True
            warn(
                f"{format_size(held)} of gradients are held from an earlier step and come on top of the promised peak: "
                "call zero_grad() before the forward pass, or give rematerialize(..., accumulate=True)"
            )

    def extra_repr(self) -> str:
        return repr(self.plan)

    def train(self, mode: bool = True) -> Rematerialized:
        self.model.train(mode)
        self.training = mode
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # where this module is a part of another
        load_own_state(self.model, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "model" not in self.__dict__:
                raise
            return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__ or "model" not in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.model, name)

    def __len__(self) -> int:
        return len(self.model)  # pyright: ignore[reportArgumentType] - not every model has a length

    def __getitem__(self, key: Any) -> Any:
        return self.model[key]  # pyright: ignore[reportIndexIssue]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.model[key] = value  # pyright: ignore[reportIndexIssue]

    def __delitem__(self, key: Any) -> None:
        del self.model[key]  # pyright: ignore[reportIndexIssue]

    def __contains__(self, key: Any) -> bool:
        return key in self.model  # pyright: ignore[reportOperatorIssue]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)  # pyright: ignore[reportCallIssue, reportArgumentType]

    def __bool__(self) -> bool:
        return True  # even where the length is 0

    def __reduce__(self) -> Any:
        raise TypeError("a rematerialized module cannot be pickled: save its state_dict() and its plan (plan.save)")

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        self._planner.backend.updates.check_copy()
        return Rematerialized(self._step.of(copy.deepcopy(self.model, memo)), self.plan, self._accumulates)


leave_alone(Rematerialized._call_impl)  # else torch.compile(module, fullgraph=True) fails
OWN = {"forward", "train", "state_dict", "load_state_dict", "extra_repr"}  # what the planned module does itself


def _overridden(kind: type[nn.Module]) -> set[str]:
    """Methods of `nn.Module` that a class of models has in a form of its own, e.g. ``to`` or ``parameters``."""
    below = kind.__mro__[: kind.__mro__.index(nn.Module)]
    names = {name for each in below for name, method in vars(each).items() if callable(method)}
    return {name for name in names - OWN if hasattr(nn.Module, name) and (name[0] != "_" or name == "_apply")}


def _forwarded(module: Rematerialized, name: str) -> Callable[..., Any]:
    """The model's method; where it returns the model, the planned module."""
    own, method = weakref.ref(module), getattr(module.model, name)

    @functools.wraps(method)
    def forwarded(*args: Any, **kwargs: Any) -> Any:
        made, planned = method(*args, **kwargs), own()
        if planned is None:
            return made
        planned.__dict__["training"] = planned.model.training  # of `eval`
        return planned if made is planned.model else made

    return forwarded


def _signed(forward: Callable[[], Any], model: nn.Module) -> Callable[..., Any]:
    """What `forward` gives, as a function with the signature and the text of the model's own, which trainers read.

    A compiler of the code around the module leaves it alone; else it would look inside, and no plan would be followed.
    """

    @functools.wraps(model.forward)
    @torch.compiler.disable(reason=COMPILES_ITSELF)
    def signed(*args: Any, **kwargs: Any) -> Any:
        return forward()(*args, **kwargs)

    return signed
