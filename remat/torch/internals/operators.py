"""Operators, their kernels, and tensors without contents."""

# ruff: noqa: F401 - other modules import these names from here

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import (
    _DISPATCH_META_HANDLERS,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    _BypassDispatchCache,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as consists_of_tensors
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_unflatten

ASKS_DEVICE = torch.ops.prim.device.default  # the call behind ``.device`` of a tensor without contents
answers_device: Callable[[Any], torch.device] = _DISPATCH_META_HANDLERS[ASKS_DEVICE]  # of its arguments
outside_modes, current_dispatch_mode = _disable_current_modes, _get_current_dispatch_mode


def fields_of(x: Any) -> dict[str, Any]:
    """What a dataclass holds, which PyTorch's trees take for a leaf; nothing of another value."""
    if isinstance(x, type) or not dataclasses.is_dataclass(x):
        return {}
    return {field.name: getattr(x, field.name) for field in dataclasses.fields(x) if hasattr(x, field.name)}


def with_tensors(function: Callable[[Tensor], Any], structure: Any) -> Any:
    """A structure with what `function` makes of its tensors, also of those in dataclasses."""

    def of(x: Any) -> Any:
        if isinstance(x, Tensor):
            return function(x)
        held = fields_of(x)
        made = {name: with_tensors(function, y) for name, y in held.items()}
        if all(made[name] is y for name, y in held.items()):
            return x
        copied = copy.copy(x)
        for name, y in made.items():
            object.__setattr__(copied, name, y)  # it may be frozen
        return copied

    return tree_map(of, structure)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has shape and dtype, but no contents."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def is_symbol(x: Any) -> bool:
    """Whether the compiler knows a number by a name only, because it depends on values of tensors."""
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Let `owner` have these attributes, in place of its own, for a while."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


_PATCHING = threading.RLock()


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """As `replaced`, of PyTorch's own, in one thread at a time: what is replaced is so for all threads.

    Else a thread would put back what another one still needs, and then the other one that of the first.
    """
    with _PATCHING, replaced(owner, **attributes):
        yield


def fakes_hidden() -> AbstractContextManager[None]:
    """Let code outside of PyTorch that asks for `torch._subclasses.FakeTensor` recognise no tensor as one."""

    class Hidden(type):
        def __instancecheck__(cls, x: Any) -> bool:
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            return asker.split(".")[0] == "torch" and isinstance(x, FakeTensor)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    return patched(torch._subclasses, FakeTensor=Hidden("FakeTensor", (), {}))


_TRACED_INSTEAD = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)


def schema_of(target: Any) -> Any:
    """The schema of an operator; None for another function."""
    return getattr(target, "_schema", None)


def native_recurrent(kind: str) -> Callable[..., Any]:
    """The function that a recurrent layer calls: ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    return getattr(torch._VF, kind)


def composite_kernel(op: OpOverload, *args: Any) -> Any:
    """Call the kernel that composes `op` of other operators."""
    return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


@contextmanager
def views_need_gradients() -> Iterator[None]:
    """Let a view of a tensor that needs a gradient need one too, as in eager mode; in a compiled step it does not."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude.remove(torch._C.DispatchKey.ADInplaceOrView)):
        yield


@contextmanager
def kernels_instead(instead: Mapping[OpOverload, Callable[..., Any] | None]) -> Iterator[None]:
    """Remove the formulas that PyTorch registers for tracing operators, and use `instead` where it has others.

    This replaces only calls of the model, not calls that another formula makes.
    """
    with patched(FakeTensorMode, cache=_CACHES[1]):
        removed = []
        try:
            for op, function in instead.items():
                removed.append((op, {key: op.py_kernels.pop(key) for key in _TRACED_INSTEAD if key in op.py_kernels}))
                if function is not None:
                    composite = op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
                    keys = _TRACED_INSTEAD if composite else _TRACED_INSTEAD[:1]
                    op.py_kernels.update(dict.fromkeys(keys, function))
                op._dispatch_cache.clear()
            yield
        finally:
            for op, kernels in removed:
                for key in _TRACED_INSTEAD:
                    op.py_kernels.pop(key, None)
                op.py_kernels.update(kernels)
                op._dispatch_cache.clear()


@contextmanager
def corrected_fakes(
    correct: Callable[[FakeTensorMode, Any, Any, Any], Any], instead: Callable[[Any, Any], Callable[..., Any] | None]
) -> Iterator[None]:
    """Let `correct` change the results of operators on tensors without contents.

    Args:
        correct: (mode, operator, arguments, PyTorch's result) -> the right result.
        instead: (operator, arguments) -> what makes the result where PyTorch cannot; None elsewhere.
    """

    def checked(self: FakeTensorMode, state: Any, key: Any, func: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if not _is_made_alike(func, args, output):
            raise _BypassDispatchCache("storage")
        return entry_of(self, state, key, func, args, kwargs, output)

    def corrected(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (make := instead(func, args)) is not None:
            with self:
                return make(*args, **(kwargs or {}))
        return correct(self, func, args, dispatch(self, func, types, args, kwargs))

    with patched(FakeTensorMode, cache=_CACHES[0]):
        dispatch, entry_of = FakeTensorMode.dispatch, FakeTensorMode._make_cache_entry
        with replaced(FakeTensorMode, dispatch=corrected, _make_cache_entry=checked):
            yield


class _Cache(dict[Any, Any]):
    """PyTorch's cache of results, whose keys have no place for settings on which its rules depend, too."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((key, _settings()), default)

    def __setitem__(self, key: Any, entry: Any) -> None:
        super().__setitem__((key, _settings()), entry)


def _settings() -> tuple[Any, ...]:
    """What decides, beside arguments, which kernel of a convolution or of attention runs, and what is refused."""
    c = torch._C
    return (
        c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only(), torch.get_num_threads(),
        c._get_mkldnn_enabled(), c._get_cudnn_enabled(), c._get_flash_sdp_enabled(), c._get_math_sdp_enabled(),
        c._get_mem_efficient_sdp_enabled(), c._get_cudnn_sdp_enabled(),
    )  # fmt: skip


# Results of operators on tensors without contents, as PyTorch keeps them, but corrected: inside of `corrected_fakes`,
# and of `kernels_instead`.
_CACHES = _Cache(), _Cache()


def _is_made_alike(func: Any, args: Any, made: Any) -> bool:
    """Whether results that PyTorch makes from noted sizes and strides have the storages of those that were made."""
    if not isinstance(func, OpOverload):
        return False
    new = [x for x in tree_leaves(made) if isinstance(x, Tensor) and not any(x is given for given in args)]
    if func.is_view or not new:  # PyTorch notes what is viewed
        return True
    storages = {x.untyped_storage()._cdata for x in tree_leaves(args) if isinstance(x, FakeTensor)}
    for x in new:
        if x.layout is not torch.strided or any(map(is_symbol, (*x.shape, *x.stride()))):
            return False
        extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
        storage = x.untyped_storage()
        if storage._cdata in storages or storage.nbytes() != extent * x.element_size():
            return False
        storages.add(storage._cdata)
    return True


@contextmanager
def overridden(
    implementations: Mapping[str, Callable[..., Any]], key: str = "CompositeImplicitAutograd"
) -> Iterator[None]:
    """Let ATen operators, by name, be other functions: composite ones, or on another dispatch key."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they were registered before is the point
        for name, implementation in implementations.items():
            library.impl(name, implementation, key)
        yield


def without_autocast() -> AbstractContextManager[None]:
    """Call kernels below the CPU's autocast."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))
