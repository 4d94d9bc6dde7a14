"""Tensors, modules, optimizers and the autograd engine."""

# ruff: noqa: F401 - other modules import these names from here

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_current_graph_task_keep_graph as retains_graph
from torch._C._autograd import _profiler_enabled as profiler_is_on
from torch.autograd import forward_ad
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils.checkpoint import SAC_IGNORED_OPS as NOT_IN_POLICIES

from remat.torch.internals.operators import outside_modes


def storage_key(tensor: Tensor) -> int:
    """An identity that tensors of one storage share; fake tensors have no address to compare."""
    return tensor.untyped_storage()._cdata


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own tables of parameters and of buffers."""
    return module._parameters, module._buffers


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """A model's parameters in any order, a shared one more than once; `model.parameters()` takes too long in a step."""
    modules, seen, found = [model], {id(model)}, list[nn.Parameter]()
    for module in modules:  # which grows
        if own := module._parameters:
            found += [p for p in own.values() if p is not None]
        for child in module._modules.values() if module._modules else ():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    return found


def places_of_children(model: nn.Module) -> list[tuple[dict[str, nn.Module | None], str, nn.Module | None]]:
    """(table, name, child) for every place of a submodule in a model."""
    return [(owner._modules, name, child) for owner in model.modules() for name, child in owner._modules.items()]


@contextmanager
def cut_to(container: nn.Module, n_children: int) -> Iterator[None]:
    """Let a container have its first children only."""
    before = dict(container._modules)
    try:
        for name in [*before][n_children:]:
            del container._modules[name]
        yield
    finally:
        container._modules.clear()
        container._modules.update(before)


def backward_hooks(module: nn.Module | None = None) -> bool:
    """Whether hooks see the module's backward pass, or that of every module."""
    if module is None:
        everywhere = nn.modules.module
        return bool(everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks)
    return bool(module._backward_hooks or module._backward_pre_hooks)


def share_tables(module: nn.Module, model: nn.Module) -> None:
    """Let `module` share the parameters, buffers and submodules of `model`, also those that are added later, and the
    hooks that see its state."""
    hooks = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *hooks):
        module.__dict__[shared] = getattr(model, shared)


def load_own_state(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Load a module's state without that of its children, as its parent does."""
    module._load_from_state_dict(*args, **kwargs)


def has_own_hooks(module: nn.Module) -> bool:
    """Whether hooks of the module's own see its calls."""
    tables = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    return any(getattr(module, table) for table in tables)


def flat_weights(layer: nn.RNNBase) -> list[Any]:
    """Weights of a recurrent layer in its kernel's order."""
    return layer._flat_weights


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function when the backward pass that runs now ends."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # pyright: ignore[reportAttributeAccessIssue]


def memory_events(profiler: Any) -> list[Any]:
    """Allocations and frees that `torch.autograd.profiler` saw, in their order; ``nbytes()`` of a free is negative."""
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    return sorted(events, key=lambda e: e.start_ns())


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The class's `step`, without the hooks that are called around it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def optimizer_without_hooks(optimizer: torch.optim.Optimizer, state: Any, group: Any) -> torch.optim.Optimizer:
    """An optimizer with the attributes of another, on other state and one group of parameters."""
    own = object.__new__(type(optimizer))
    vars(own).update(
        vars(optimizer), state=state, param_groups=[group], _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={}
    )
    return own


def note_step(optimizer: torch.optim.Optimizer) -> None:
    """Let learning rate schedulers know that the optimizer has stepped; else they warn."""
    optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]


def has_hooks(parameter: Tensor) -> bool:
    """Whether a hook sees the parameter's gradient."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def of_no_bytes(kind: type[Tensor], like: Tensor) -> Tensor:
    """A tensor of a class with the shape and dtype of another, without a storage."""
    return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue]
        kind, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
    )


will_run = torch._C._will_engine_execute_node  # (node): does the backward pass that runs now reach it?
backward_pass = torch._C._current_graph_task_id  # (): which backward pass runs now in this thread?


def gets_gradient(leaf: Any) -> bool:
    """Whether the backward pass that runs now adds to the gradient of a leaf, given by its node."""
    try:
        return will_run(leaf)
    except RuntimeError:  # the answer for leaves in torch.autograd.grad, which adds to none
        return False


def adds_to_a_leaf(tensor: Tensor) -> bool:
    """Whether the backward pass that runs now adds to gradients of leaves right behind a tensor, so that it is no
    `torch.autograd.grad`."""
    assert tensor.grad_fn is not None
    return any(gets_gradient(node) for node, _ in tensor.grad_fn.next_functions if hasattr(node, "variable"))


def hooks_of(tensor: Tensor) -> Any:
    """The hooks that see a tensor's gradient, by their numbers; None if there never was one."""
    return tensor._backward_hooks


def version_of(tensor: Tensor) -> int:
    """How often the tensor has changed in place. Kernels that update statistics of batch norm do not count."""
    return tensor._version


def identity(gradient: Tensor) -> tuple[int, int]:
    """What changes when the autograd engine adds another gradient to this one, in place or not."""
    return gradient._cdata, version_of(gradient)


def is_captured(gradients: Sequence[Tensor | None], i: int) -> bool:
    """Whether somebody holds a gradient that a node's hook gets beside the node, as `torch.autograd.grad` does of a
    gradient that it returns."""
    gradient = gradients[i]
    if gradient is None:
        return False
    return gradient._use_count() > _uses_of_gradient() + sum(x is gradient for x in gradients)  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _uses_of_gradient() -> int:
    """How often a gradient that nobody else holds is in use while a node's hook gets it, beside the node's own use."""
    uses, leaf = list[int](), torch.zeros((), requires_grad=True)
    with outside_modes(), torch.enable_grad():
        made = leaf.square()
        assert made.grad_fn is not None
        made.grad_fn.register_prehook(lambda gradients: uses.append(gradients[0]._use_count()))  # pyright: ignore[reportAttributeAccessIssue]
        made.square().backward()
    return uses[0] - 1


def goes_on(tensor: Tensor) -> bool:
    """Whether the backward pass that runs now goes on from a tensor to what it was made of.

    Else it only reaches the tensor because `torch.autograd.grad` asks for its gradient.
    """

    def is_reached(node: Any) -> bool:
        try:
            return will_run(node)
        except RuntimeError:  # the answer for leaves of which `torch.autograd.grad` asks for the gradient
            return True

    assert tensor.grad_fn is not None
    return any(is_reached(node) for node, _ in tensor.grad_fn.next_functions if node is not None)


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or differentiation in forward mode is active."""
    levels: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return levels.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def hooks_of_all_modules() -> tuple[int, ...]:
    """Numbers of the hooks that are registered for all modules; no two hooks of a process have the same."""
    module = torch.nn.modules.module
    kinds = (
        module._global_forward_pre_hooks, module._global_forward_hooks, module._global_backward_pre_hooks,
        module._global_backward_hooks,
    )  # fmt: skip
    return tuple(number for hooks in kinds for number in hooks)


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of the autograd graph is a compiled backward half."""
    return "CompiledFunctionBackward" in node.name()
