"""Every private interface of PyTorch that remat uses; a test checks that no other module uses one.

Checked with PyTorch 2.11.0, 2.13.0 and 2.15.0: ``make test-torch TORCH=2.15.0`` runs the tests with another version.
The interfaces, and where PyTorch keeps them:

- trees of tensors: ``torch.utils._pytree``
- tensors without contents: ``torch._subclasses.fake_tensor``, with the one function that dispatches their operators
- dispatch modes: ``torch.utils._python_dispatch``
- Dynamo: its settings, its stance, its exceptions, its notes in a graph's nodes, its notes of what a step changes,
  the function that runs a call on tensors without contents, the one that follows a `torch.autograd.Function`
- AOT autograd: its entry, its settings, its descriptions of inputs and outputs, its guess of a gradient's layout
- the min-cut partitioner and its settings; Inductor's entry, and its setting for another partitioner
- kernels that are registered for tracing: ``OpOverload.py_kernels``, `torch._C.DispatchKey`
- registered implementations of operators, for a while: ``torch.library._scoped_library``
- native recurrent layers: ``torch._VF``; their list of weights
- the dispatch keys that a thread leaves out
- the calls that policies of selective checkpointing are not asked about
- optimizers: their `step` without hooks, the note of learning rate schedulers that it was called; hooks of a parameter;
  whether a backward pass will reach a node of the autograd graph, and its number
- the identity of a storage, the base of a view, the tables of tensors of a module, the profiler's events
- the autograd engine's callback after a backward pass, and its number of the pass that runs
- the levels of transforms and of forward-mode differentiation; hooks on backward passes of modules
- numbers that the compiler knows by a name

Operators (``torch.ops.aten``) are not private, although some names begin with an underscore: graphs consist of them.
"""

# ruff: noqa: F401 - other modules import these names from here

from __future__ import annotations

import copy
import dis
import functools
import itertools
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._C._autograd import _get_current_graph_task_keep_graph, _profiler_enabled
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch._functorch._aot_autograd.descriptors import (
    InputMutationAOTOutput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    ViewBaseAOTInput,
)
from torch._guards import TracingContext
from torch._guards import tracing as tracing_in
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims_common import make_contiguous_strides_for, suggest_memory_format
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.autograd import forward_ad
from torch.fx.graph import _BoxedCodeGen
from torch.fx.node import map_arg
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as consists_of_tensors
from torch.utils._pytree import tree_flatten, tree_iter, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import SAC_IGNORED_OPS as NOT_IN_POLICIES

outside_modes, current_dispatch_mode = _disable_current_modes, _get_current_dispatch_mode
_Partition = Callable[[fx.GraphModule, int], tuple[fx.GraphModule, fx.GraphModule]]


# Tensors, storages and modules


def storage_key(tensor: Tensor) -> int:
    """An identity that tensors of one storage share; fake tensors have no address to compare."""
    return tensor.untyped_storage()._cdata


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has shape and dtype, but no contents."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def is_symbol(x: Any) -> bool:
    """Whether the compiler knows a number by a name only, because it depends on values of tensors."""
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def base_of(tensor: Tensor) -> Tensor | None:
    """The tensor that this one is a view of; None if it is no view."""
    return tensor._base


def module_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's own tables of parameters and of buffers."""
    return module._parameters, module._buffers


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
    """Let `module` share the parameters, buffers and submodules of `model`, also those that are added later."""
    for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
        module.__dict__[shared] = getattr(model, shared)


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


def profiler_is_on() -> bool:
    """Whether PyTorch's profiler runs, of which there can be only one."""
    return _profiler_enabled()


@contextmanager
def fakes_hidden() -> Iterator[None]:
    """Let code outside of PyTorch that asks for `torch._subclasses.FakeTensor` recognise no tensor as one."""

    class Hidden(type):
        def __instancecheck__(cls, x: Any) -> bool:
            asker = str(sys._getframe(1).f_globals.get("__name__"))
            return asker.split(".")[0] == "torch" and isinstance(x, FakeTensor)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, FakeTensor)

    torch._subclasses.FakeTensor = Hidden("FakeTensor", (), {})
    try:
        yield
    finally:
        torch._subclasses.FakeTensor = FakeTensor


@contextmanager
def tracing_shown(told: Iterable[Place] | None = None) -> Iterator[None]:
    """Let models that ask whether they are being traced hear that they are, without a compiler.

    Args:
        told: where they hear so, as noted by `as_in_eager_mode`; by default everywhere.
    """
    original = torch.compiler.is_compiling
    places = [] if told is None else [_in_models(place[:-1]) for place in told]  # the last one called the model

    def answer() -> bool:
        place = _in_models((frame.f_code.co_filename, at) for frame, at in traceback.walk_stack(sys._getframe(1)))
        return told is None or any(place[: len(each)] == each for each in places)

    torch.compiler.is_compiling = answer
    try:
        yield
    finally:
        torch.compiler.is_compiling = original


def _in_models(place: Iterable[tuple[str, int]]) -> Place:
    """A place without PyTorch's own lines."""
    own = os.path.dirname(torch.__file__)
    return tuple((file, line) for file, line in place if not file.startswith(own))


# Optimizers


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


def will_run(node: Any) -> bool:
    """Whether the backward pass that runs now reaches a node of the autograd graph."""
    return torch._C._will_engine_execute_node(node)


def backward_pass() -> int:
    """Which backward pass runs now in this thread."""
    return torch._C._current_graph_task_id()


def gets_gradient(leaf: Any) -> bool:
    """Whether the backward pass that runs now adds to the gradient of a leaf, given by its node."""
    try:
        return will_run(leaf)
    except RuntimeError:  # the answer for leaves in torch.autograd.grad, which adds to none
        return False


def hooks_of(tensor: Tensor) -> Any:
    """The hooks that see a tensor's gradient, by their numbers; None if there never was one."""
    return tensor._backward_hooks


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


# Operators and kernels

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
    dispatch = FakeTensorMode.dispatch

    def corrected(self: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (make := instead(func, args)) is not None:
            with self:
                return make(*args, **(kwargs or {}))
        return correct(self, func, args, dispatch(self, func, types, args, kwargs))

    FakeTensorMode.dispatch = corrected
    try:
        yield
    finally:
        FakeTensorMode.dispatch = dispatch


# Dynamo


@contextmanager
def compiler_settings(most_graphs: int) -> Iterator[None]:
    """The compiler's settings for capturing and executing steps.

    Recurrent layers are let through. Up to `most_graphs` shapes and modes may each have their graph.
    DistributedDataParallel must not cut graphs into buckets. Dynamo notices hooks that are added later. Sizes of
    storages do not depend on earlier captures. The backward pass does not cast, as in eager mode, even if the forward
    pass runs under autocast. An operator that refuses its arguments raises without a traceback in PyTorch's log.
    Calls that only write messages or mark ranges for a profiler are left out. A model may differentiate in `forward`.
    NumPy's random numbers are refused; by default they become PyTorch's.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, log.disabled = log.disabled, True
    ignored = {_IGNORED: getattr(torch._dynamo.config, _IGNORED) | _calls_without_result(len(vars(logging.Logger)))}
    try:
        with functorch_config.patch(backward_pass_autocast="off"), torch._dynamo.config.patch(
            allow_rnn=True, recompile_limit=most_graphs, accumulated_recompile_limit=4 * most_graphs,
            optimize_ddp=False, skip_nnmodule_hook_guards=False, fake_tensor_cache_enabled=False,
            trace_autograd_ops=True, use_numpy_random_stream=True, **ignored,
        ):  # fmt: skip
            yield
    finally:
        log.disabled = was_disabled


_IGNORED = next(
    name for name in ("ignore_logging_functions", "ignore_logger_methods") if hasattr(torch._dynamo.config, name)
)
_ANSWERS = {"getEffectiveLevel", "getChild", "getChildren", "hasHandlers"}  # of a logger, on which a model may depend


@functools.cache
def _calls_without_result(_n_methods: int) -> set[Callable[..., Any]]:
    """Functions on whose results no model depends: loggers' methods (also those of other libraries), warnings, ranges.

    `isEnabledFor` is among them: without a result it counts as False. Libraries add methods: `_n_methods` of loggers.
    """
    methods = {
        method for kind in {logging.Logger, logging.getLoggerClass()} for name, method in vars(kind).items()
        if callable(method) and not name.startswith("_") and name not in _ANSWERS
    }  # fmt: skip
    names = ("debug", "info", "warning", "error", "critical", "exception", "log")
    ranges = {getattr(torch.cuda.nvtx, name) for name in ("range_push", "range_pop", "mark")}
    return methods | {getattr(logging, name) for name in names} | ranges | {warnings.warn}


Place = tuple[tuple[str, int], ...]  # (file, line) of a call and of its callers, the innermost first


@dataclass(slots=True)
class Told:
    """How a model has to be traced.

    Attributes:
        places: in its code where it hears that it is traced.
        numbers: in attributes, as Dynamo has them, which are no constants.
    """

    places: set[Place] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)


class _Everywhere:
    def __contains__(self, place: object) -> bool:
        return True


EVERYWHERE: Container[Place] = _Everywhere()
_READS_ONLY = "remat_reads_only"  # meta of a call of Dynamo's graph


class _Tracing(threading.local):
    """How Dynamo traces in this thread; what is changed in it is looked up here, because to change it takes long.

    Attributes:
        as_in_eager_mode: a model hears that it is not traced, and more is followed.
        told: places at which it hears the truth.
        asked: where it asked last, and did not hear the truth.
        values: of the arguments, on which the model may branch; None if they are not known.
    """

    as_in_eager_mode = False
    told: Container[Place] = ()
    asked: Place | None = None
    values: Any = None


tracing = _Tracing()


@contextmanager
def as_in_eager_mode(told: Container[Place], values: Any = None) -> Iterator[None]:
    """Let Dynamo trace what a model does in eager mode.

    - Models that ask whether they are being traced hear that they are not. The truth is told at the places `told`, and
      to PyTorch's own modules: what these do instead gives the same results.
    - A branch on the value of a tensor that depends on no tensor from outside is followed, e.g. of one made of
      `torch.arange`: it has the same contents in each call.
    - A branch on `values` is followed too, see `remat.torch._branches`.
    - A tensor that the model has made may be told to require a gradient, see `_let_leaves_through`.
    - Python's random generators in objects are refused: Dynamo would repeat the numbers of the first call.
    - A Function of the user's that tells missing gradients from zeros is refused: Dynamo gives it zeros.
    - A refusal notes in which module it stops, for `modules_at`.
    """
    _answer_questions()
    _follow_more()
    _let_leaves_through()
    _refuse_generators()
    _note_modules()
    _note_writes()
    _refuse_missing_gradients()
    before = tracing.as_in_eager_mode, tracing.told, tracing.asked, tracing.values
    tracing.as_in_eager_mode, tracing.told, tracing.asked, tracing.values = True, told, None, values
    try:
        yield
    finally:
        tracing.as_in_eager_mode, tracing.told, tracing.asked, tracing.values = before


@functools.cache
def _answer_questions() -> None:
    """Let Dynamo ask here how to answer a model's questions about tracing."""
    from torch._dynamo.variables import ConstantVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: dict[Any, Any] = TorchInGraphFunctionVariable._get_handlers()
    functions = (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch.compiler.is_exporting)
    original = {function: handlers[function] for function in functions}

    def answer(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        truth, place = original[self.value](self, tx, *args, **kwargs), _place_of(tx)
        is_own = str(tx.f_globals.get("__name__")).split(".")[0] == "torch"
        if is_own or place in tracing.told or not tracing.as_in_eager_mode:
            return truth
        tracing.asked = place
        return ConstantVariable.create(False)

    def no(self: Any, tx: Any) -> Any:  # Dynamo cannot trace the question whether a stream is being captured
        return ConstantVariable.create(False)

    handlers.update(dict.fromkeys(functions, answer))
    for place in (torch.cuda, torch.xpu):
        if (function := getattr(place, "is_current_stream_capturing", None)) is not None:
            torch._dynamo.allow_in_graph(function)  # so that Dynamo looks for a handler; it skips some functions
            handlers[function] = no


@contextmanager
def numbers_open(names: Collection[str]) -> Iterator[None]:
    """Let numbers of these names be arguments of the graph that Dynamo captures."""
    with torch.compiler.config.patch(dynamic_sources=",".join(sorted(names))) if names else nullcontext():  # pyright: ignore[reportAttributeAccessIssue]
        yield


def changed_numbers() -> dict[str, tuple[Any, Any]]:
    """[name of an attribute] (number now, number after), if the step that Dynamo compiles now reads and changes it.

    Call in a backend.
    """
    output, found = _output_of_dynamo(), dict[str, tuple[Any, Any]]()
    read = {_name_of(guard.originating_source) for guard in output.guards}
    for owner, stored in output.side_effects.store_attr_mutations.items():
        for attribute, made in stored.items() if _was_there(owner) else ():
            name = f"{_name_of(owner.source)}.{attribute}"
            if name not in read or not made.is_python_constant() or not hasattr(owner, "value"):
                continue
            before, after = getattr(owner.value, attribute, None), made.as_python_constant()
            if {type(before), type(after)} <= {int, float} and before != after:
                found[name] = before, after
    return found


def changed_containers() -> dict[str, Any]:
    """[name] list, dict, set or deque that the step that Dynamo compiles now changes. Call in a backend."""
    side_effects = _output_of_dynamo().side_effects
    objects = {id(x): x for x in side_effects.keepalive}
    return {
        _name_of(variable.source): objects.get(key)
        for key, variable in side_effects.id_to_variable.items()
        if _was_there(variable)
        and isinstance(objects.get(key), (list, dict, set, deque))
        and side_effects.is_modified(variable)
    }


def _was_there(variable: Any) -> bool:
    """Whether an object of the step that Dynamo compiles now was not made in it, so that it has a name."""
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    existing = isinstance(variable.mutation_type, (AttributeMutationExisting, ValueMutationExisting))
    return existing and variable.source is not None


def _output_of_dynamo() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _name_of(source: Any) -> str:
    """Dynamo's name of where it found something; a method in PyTorch 2.11."""
    return str(source.name() if callable(source.name) else source.name)


def shown_name(name: str) -> str:
    """Dynamo's name of an attribute as the user knows it: ``L['model']._modules['norm'].n`` is ``norm.n``."""
    name = re.sub(r"(\.__dict__)?(\['_modules'\]|\._modules)\['?([^'\]]+)'?\]", r".\3", name)
    return re.sub(r"^[LG]\['[^']*'\]\.?", "", name)


def attribute_name(place: fx.Node) -> str:
    """The name of the attribute that a placeholder of Dynamo's graph holds."""
    return shown_name(_name_of(place.meta["grapharg"].source))


def _place_of(tx: Any) -> Place:
    found = []
    while tx is not None:
        found.append((tx.f_code.co_filename, tx.lineno))
        tx = tx.parent
    return tuple(found)


@functools.cache
def _follow_more() -> None:
    """Let Dynamo ask here before it follows a jump or sets an attribute; there is no other place for it."""
    from torch._dynamo import symbolic_convert as translators

    jumps = [i for i, name in enumerate(dis.opname) if "JUMP" in name and name.endswith(("TRUE", "FALSE", "OR_POP"))]
    first = {**dict.fromkeys(jumps, _decide), dis.opmap["STORE_ATTR"]: _require_gradient}

    def after(begin: Callable[[Any, Any], bool], follow: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
        def both(tx: Any, instruction: Any) -> None:
            if not (tracing.as_in_eager_mode and begin(tx, instruction)):
                follow(tx, instruction)

        return both

    kinds = [x for x in vars(translators).values() if isinstance(getattr(x, "dispatch_table", None), list)]
    for table in {id(kind.dispatch_table): kind.dispatch_table for kind in kinds}.values():
        for opcode in first:
            table[opcode] = after(first[opcode], table[opcode])


def _decide(tx: Any, _instruction: Any) -> bool:
    """Replace a tensor on which a jump depends by its value, if that is known."""
    from torch._dynamo.variables import ConstantVariable, TensorVariable

    value = tx.stack[-1]
    if isinstance(value, TensorVariable) and (found := _outcome_of(value.as_proxy().node)) is not None:
        tx.stack[-1] = ConstantVariable.create(found)
    return False


def _require_gradient(tx: Any, instruction: Any) -> bool:
    """Follow ``x.requires_grad = True`` as ``x.requires_grad_()`` for a tensor of the model; whether it is one."""
    from torch._dynamo.variables import TensorVariable

    target = tx.stack[-1]
    is_own = isinstance(target, TensorVariable) and not target.source and instruction.argval == "requires_grad"
    if is_own:
        value, _ = tx.popn(2)
        target.method_requires_grad_(tx, value)
    return is_own


@functools.cache
def _let_leaves_through() -> None:
    """Let a model require a gradient of a tensor that it made, e.g. of a frozen embedding, for checkpoints behind it.

    What parameters get does not depend on it. PyTorch 2.11 cannot trace it, and it is left out. Later versions trace it
    and refuse if an output depends on such a tensor; only the gradient of a tensor that is an output itself is lost.
    """
    from torch._dynamo.output_graph import OutputGraph
    from torch._dynamo.variables import TensorVariable

    name = "_check_requires_grad_intermediate_outputs"
    check: Any = getattr(OutputGraph, name, None)
    follow = TensorVariable.method_requires_grad_

    def check_outputs(self: Any, outputs: Any, tx: Any) -> None:
        leaves = {x.as_proxy().node for x in self.leaf_var_creation_order if not x.source}
        returned = (x.as_proxy().node for x in outputs if isinstance(x, TensorVariable))
        if not tracing.as_in_eager_mode or not leaves.isdisjoint(returned):
            check(self, outputs, tx)

    def left_out(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return self if tracing.as_in_eager_mode and not self.source else follow(self, tx, *args, **kwargs)

    if check is None:
        TensorVariable.method_requires_grad_ = left_out
    else:
        setattr(OutputGraph, name, check_outputs)


@functools.cache
def _refuse_generators() -> None:
    from torch._dynamo.variables.misc import RandomVariable

    is_followed = RandomVariable.is_supported_random_obj

    def none(generator: Any) -> bool:
        return not tracing.as_in_eager_mode and is_followed(generator)

    setattr(RandomVariable, "is_supported_random_obj", staticmethod(none))  # noqa: B010 - its type is narrower


MISSING_GRADIENTS = "calls ctx.set_materialize_grads(False) and has several outputs"


@functools.cache
def _refuse_missing_gradients() -> None:
    from torch._dynamo.exc import Unsupported
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.higher_order_ops import AutogradFunctionApplyVariable
    from torch._dynamo.variables.misc import AutogradFunctionContextVariable

    follow = AutogradFunctionApplyVariable.call_function

    def asking(tx: Any) -> set[int]:
        """The contexts of Functions that ask for missing gradients as None."""
        return {
            id(owner) for owner, stored in tx.output.side_effects.store_attr_mutations.items()
            if isinstance(owner, AutogradFunctionContextVariable)
            and "materialize_grads" in stored and not stored["materialize_grads"].as_python_constant()
        }  # fmt: skip

    def unless_missing(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        before = asking(tx)
        made = follow(self, tx, args, kwargs)
        outputs = [x for x in getattr(made, "items", [made]) if isinstance(x, TensorVariable)]
        if tracing.as_in_eager_mode and len(outputs) > 1 and asking(tx) - before:
            name = self.bwd_fn.__qualname__.rpartition(".")[0].rpartition("<locals>.")[2]
            raise Unsupported(f"the torch.autograd.Function {name} {MISSING_GRADIENTS}")
        return made

    AutogradFunctionApplyVariable.call_function = unless_missing


Modules = Sequence[tuple[str, str]]  # (path from the traced function, class) of nested modules, the outermost first


@functools.cache
def _note_modules() -> None:
    """Let Dynamo note in an exception which modules are running where it is raised."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    run = InstructionTranslatorBase.run

    def noting(self: Any) -> Any:
        try:
            return run(self)
        except Exception as error:
            if tracing.as_in_eager_mode and not modules_at(error):
                error.running_modules = _named(self.nn_module_stack)  # pyright: ignore[reportAttributeAccessIssue]
            raise

    InstructionTranslatorBase.run = noting


def modules_at(error: BaseException | None) -> Modules:
    """The modules that were running when Dynamo stopped; none if that is not known."""
    while error is not None:
        if found := getattr(error, "running_modules", ()):
            return found
        error = error.__context__
    return ()


def modules_of(node: fx.Node) -> Modules:
    """The modules that were running when a node was made; none if that is not known."""
    return _named(node.meta.get("nn_module_stack") or {})


def _named(stack: Mapping[str, tuple[str, Any]]) -> Modules:
    return [(path, getattr(kind, "__name__", str(kind))) for path, kind in stack.values()]


@dataclass(frozen=True, slots=True)
class Calculation:
    """A calculation of Dynamo's graph whose result has one element.

    Attributes:
        code: equal for the same calculation.
        arguments: indices of the tensors that it takes, among the leaves of a call's arguments.
    """

    code: str
    arguments: tuple[int, ...]
    function: Callable[..., Tensor] = field(compare=False)

    def outcome(self, leaves: Sequence[Any]) -> bool:
        """Whether the result is not 0, for these leaves."""
        with outside_modes(), torch.no_grad():
            return bool(self.function(*(leaves[i].clone() for i in self.arguments)))  # the user's own stay as they are


def _calculation_of(node: fx.Node) -> Calculation | None:
    """How a tensor with one element is calculated; None if it depends on more than constants and arguments whose values
    may be read, or on what changes in place."""
    example = example_of(node)
    if not isinstance(example, Tensor) or example.numel() != 1:
        return None
    graph, made, arguments = fx.Graph(), dict[fx.Node, fx.Node](), dict[int, fx.Node]()
    needed, todo = set[fx.Node](), [node]
    while todo:
        each = todo.pop()
        if each.op == "placeholder" and tracing.values is not None and each not in made:
            index = tracing.values.index(getattr(each.meta.get("grapharg"), "example", None))
            if index is None:
                return None
            arguments[index] = made[each] = graph.placeholder(f"argument_{index}")
        elif each.op not in ("call_function", "call_method", "placeholder"):
            return None
        needed.add(each)
        todo += [before for before in each.all_input_nodes if before not in needed]
    storages = {storage_key(x) for each in needed for x in tree_leaves(example_of(each)) if _is_held(x)}
    for each in node.graph.nodes:
        if _writes(each) and any(_is_held(x) and storage_key(x) in storages for x in _examples_read_by(each)):
            return None
        if each in needed and each not in made:
            args, kwargs = map_arg((each.args, each.kwargs), made.__getitem__)
            made[each] = graph.create_node(each.op, each.target, args, kwargs)
    graph.output(made[node])
    return Calculation(str(graph), tuple(arguments), fx.GraphModule({}, graph))


def _is_held(x: Any) -> bool:
    """Whether a tensor has a storage of its own or shares one."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]
    return isinstance(x, Tensor) and x.layout is torch.strided and not is_wrapped(x)


def _examples_read_by(node: fx.Node) -> list[Any]:
    return [x for each in node.all_input_nodes for x in tree_leaves(example_of(each))]


def _outcome_of(node: fx.Node) -> bool | None:
    """Whether a tensor on which a jump depends is not 0, if that is known and depends on no draw; else None."""
    calculation, values = _calculation_of(node), tracing.values
    if calculation is None:
        return None
    with torch.random.fork_rng():
        state = torch.get_rng_state()
        outcome = calculation.outcome(values.leaves if values else ())
        if not torch.equal(state, torch.get_rng_state()):
            return None
    return values.outcome(calculation) if calculation.arguments else outcome


@functools.cache
def _note_writes() -> None:
    """Let Dynamo note in a call whether it leaves the tensors that it takes as they are."""
    from torch._dynamo import utils

    run = utils.run_node

    def noting(tracer: Any, node: fx.Node, args: Any, kwargs: Any, module: Any) -> Any:
        before = _versions((args, kwargs))
        made = run(tracer, node, args, kwargs, module)
        is_seen = not isinstance(node.target, HigherOrderOperator)  # a kernel behind it does not run while it is traced
        node.meta[_READS_ONLY] = is_seen and before is not None and before == _versions((args, kwargs))
        return made

    utils.run_node = noting


def _versions(args: Any) -> list[int] | None:
    """How often each tensor among arguments has changed in place; None if that is not counted."""
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    return None if any(x.is_inference() for x in tensors) else [x._version for x in tensors]


def _writes(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graph may change its arguments."""
    schemas = [schema_of(node.target)] if isinstance(node.target, OpOverload) else []
    return not node.meta.get(_READS_ONLY) or any(schema.is_mutable for schema in schemas)


def compiler_is_disabled() -> bool:
    """Whether ``TORCHDYNAMO_DISABLE`` or the setting behind it is on."""
    return torch._dynamo.config.disable


def compiler_stance() -> str:
    """The last argument of `torch.compiler.set_stance`."""
    return torch._dynamo.eval_frame._stance.stance


def is_transformed() -> bool:
    """Whether a transform of `torch.func` or differentiation in forward mode is active."""
    levels: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return levels.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def primals_of(graph: fx.GraphModule) -> tuple[Any, ...]:
    """The real tensors behind the placeholders of a graph that Dynamo hands to its backend."""
    return tuple(node.meta["grapharg"].example for node in graph.graph.find_nodes(op="placeholder"))


def grad_mode_after(node: fx.Node, before: bool) -> bool:
    """Whether gradients are on after a call of such a graph."""
    return bool(node.args[0]) if node.target is torch._C._set_grad_enabled else before


def example_of(node: fx.Node) -> Any:
    """What a node of such a graph makes, with tensors without contents; None if that is not noted."""
    return node.meta.get("example_value")


def is_function(node: fx.Node) -> bool:
    """Whether a node of such a graph is the call of a `torch.autograd.Function`."""
    return getattr(node.target, "__name__", "") == "autograd_function_apply"


# What AOT autograd writes into the nodes of a training graph

FORWARD, BACKWARD = "is_forward", "is_backward"
COPIED_META = ("val", "tensor_meta", "desc")  # of a placeholder that holds the same tensor in another graph


def in_pass(which: str) -> dict[str, str]:
    """Meta of a node in the pass `which`, ``FORWARD`` or ``BACKWARD``."""
    return {"partitioner_tag": which}


def pass_of(node: fx.Node) -> dict[str, str]:
    """Meta of a node in the same pass as `node`."""
    return {key: node.meta[key] for key in ("partitioner_tag",) if key in node.meta}


def is_in_forward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in (FORWARD, "must_be_in_forward")


def is_in_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in (BACKWARD, "must_be_in_backward")


def called_by_name(node: fx.Node) -> Any:
    """The name (``to``) or function that the model called, if it is known."""
    calls = node.meta.get("source_fn_stack") or [("", None)]
    return calls[-1][1]


def primal_index(place: fx.Node) -> int:
    """Index of the primal that a placeholder holds."""
    description: Any = place.meta["desc"]
    return description.idx


def is_tangent(place: fx.Node) -> bool:
    """Whether a placeholder of a training graph holds the gradient of an output."""
    return place.name.startswith("tangents")


def differentiated_output(tangent: fx.Node) -> Any:
    """The description of the output whose gradient a placeholder holds; None if it is the gradient of an input."""
    return getattr(tangent.meta["desc"], "output", None)


def descriptions_of_outputs(graph: fx.Graph) -> list[Any]:
    """Descriptions of the outputs of a training graph."""
    return list(graph.find_nodes(op="output")[0].meta["desc"])


def with_descriptions(end: fx.Node, descriptions: Sequence[Any], n_saved: int) -> None:
    """Describe the outputs of a half; its last `n_saved` are saved for backward."""
    end.meta["desc"] = [*descriptions, *(SavedForBackwardsAOTOutput(i) for i in range(n_saved))]


def is_plain_output(description: Any) -> bool:
    """Whether the module itself returned an output."""
    return isinstance(description, PlainAOTOutput)


def is_view_base(place: fx.Node) -> bool:
    """Whether a placeholder holds the common base of arguments that overlap."""
    return isinstance(place.meta["desc"], ViewBaseAOTInput)


def mutated_input(description: Any) -> int | None:
    """Index of the primal whose new contents an output holds; None for other outputs."""
    mutated: Any = description.mutated_input if isinstance(description, InputMutationAOTOutput) else None
    return None if mutated is None else mutated.idx


# AOT autograd


@contextmanager
def gradients_without_holes() -> Iterator[None]:
    """Let the gradient of an output that is a part of a larger tensor be dense, as a loss makes it.

    By default the backward pass takes it in the output's strides: for ``x[:, 0]`` it would be as large as ``x``.
    """
    name = "coerce_tangent_and_suggest_memory_format"
    original = getattr(collect_metadata_analysis, name)

    def dense(output: Any) -> Any:
        gradient, layout, is_other = original(output)
        if type(layout).__name__ == "MemoryFormatMeta" and layout.stride is not None:
            without_holes = gradient.clone()
            if without_holes.stride() != gradient.stride():
                return without_holes, type(layout).from_tensor(without_holes), True
        return gradient, layout, is_other

    setattr(collect_metadata_analysis, name, dense)
    try:
        yield
    finally:
        setattr(collect_metadata_analysis, name, original)


def forbid_overwriting() -> None:
    """Call while a half is compiled: backward then overwrites none of its arguments, so that it may run twice."""
    context = TracingContext.try_get()
    if context is not None and context.fw_metadata is not None:
        context.fw_metadata.bw_donated_idxs = []


def boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """The module's code as a function of one list, whose items it drops after their last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOT autograd that a function takes one list."""
    function._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def retains_graph() -> bool:
    """Whether the backward pass that runs keeps the graph for another one."""
    return _get_current_graph_task_keep_graph()


def is_compiled_backward(node: Any) -> bool:
    """Whether a node of the autograd graph is a compiled backward half."""
    return "CompiledFunctionBackward" in node.name()


_PARTITIONER = threading.Lock()  # its settings and the fake tensors of a step belong to one thread at a time


def min_cut(
    module: fx.GraphModule, n_forward_outputs: int, costs: Mapping[str, int] | None, share: float = 1.0,
    solver: str = "dp",
) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
    """The halves of a training graph as `torch.compile` cuts it; names of nodes stay, and `module` does not change.

    Args:
        costs: of calls by their names, others cost 0; None for PyTorch's own estimate, its counter of FLOPs.
        share: ``activation_memory_budget``, of the bytes that would be saved without recomputation.
        solver: ``activation_memory_budget_solver``.
    """
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.custom_graph_pass import CustomRuntimeEstimator

    class Costs(CustomRuntimeEstimator):
        def __call__(self, node: fx.Node) -> float:
            return 0.0 if costs is None else float(costs.get(node.name, 0))

        def uuid(self) -> None:
            """None, so that nothing is cached."""

    copied = fx.GraphModule(module, _copied(module.graph))
    copied.graph.find_nodes(op="output")[0].meta.update(module.graph.find_nodes(op="output")[0].meta)
    settings: dict[str, Any] = {
        "activation_memory_budget": share,
        "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": "flops" if costs is None else Costs(),
        "cse": False,  # so that nodes keep their names
    }
    with _PARTITIONER, functorch_config.patch(settings):
        return min_cut_rematerialization_partition(copied, (), num_fwd_outputs=n_forward_outputs)


# Inductor


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer of generated code.

    Attributes:
        name: in the code.
        node: of the half for which it was made; '' if that is not known.
        is_result: whether it is that node's result; else perhaps a part of it, or an argument in another layout.
        bytes: its size; 0 if it has no storage of its own.
    """

    name: str
    node: str
    is_result: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class LoweredHalf:
    """What Inductor makes of the forward or the backward half.

    Attributes:
        source: the generated code; it defines ``call``, which takes one list.
        groups: for each group of calls that it fuses, the buffers that the group fills.
        is_extern: for each group whether it is a call of a library, not generated code.
        inputs, outputs: names in the code, of those that are tensors.
    """

    source: str
    groups: tuple[tuple[Buffer, ...], ...]
    is_extern: tuple[bool, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def records_cuda_graphs() -> bool:
    """Whether Inductor's settings ask for CUDA graphs."""
    import torch._inductor.config

    return torch._inductor.config.triton.cudagraphs


def inductor(graph: fx.GraphModule, example_inputs: Sequence[Any], partition: _Partition) -> Callable[..., Any]:
    """A backend that lets Inductor compile both halves.

    Inductor asks for a partition of the training graph after its own passes over it. These decompose operators and
    draw random numbers from seeds; each seed is drawn once. It then fuses calls, so that it needs other memory than the
    graph says.
    """
    import torch._inductor.config  # takes seconds, like the next imports
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, CustomSchedulerPass

    class Partitioner(CustomPartitionerFn):
        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any) -> Any:
            with outside_modes():
                return partition(gm, kwargs["num_fwd_outputs"])

        def __deepcopy__(self, memo: Any) -> Partitioner:  # Inductor copies its settings
            return self

        def __reduce__(self) -> Any:  # as a part of the key of Inductor's cache
            return str, (self.uuid(),)

        def uuid(self) -> str:
            """Always the same: each half has its own key, which holds the calls that the plan put there."""
            return "remat"

    class Ordered(CustomSchedulerPass):
        """Groups of calls run in the plan's order; calls of one group may be fused.

        Else Inductor moves repeated calls to earlier ones that read the same, and their results are held for too long.
        """

        def __call__(self, nodes: Any) -> Any:
            in_group = _grouped(nodes)
            # A buffer that waits for its next use takes memory, of which the plan does not know.
            torch._inductor.config.allow_buffer_reuse = reuses_buffers and not in_group
            return _keep_order(nodes, in_group) if in_group else nodes

        def uuid(self) -> str:
            return "remat"

    reuses_buffers = torch._inductor.config.allow_buffer_reuse
    # AOT autograd's own cache has a key that does not know the plan. The backward half is compiled at once, under
    # these settings, not at the first call of backward.
    with (
        torch._inductor.config.patch(
            custom_partitioner_fn=Partitioner(), _pre_fusion_custom_pass=Ordered(), allow_buffer_reuse=reuses_buffers
        ),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        return compile_fx(graph, list(example_inputs))  # pyright: ignore[reportReturnType]


def name_in_group(name: str, group: int) -> str:
    """A name by which Inductor's scheduler keeps a call's place, see `inductor`."""
    return f"remat_group_{group}_{name}"


def _grouped(nodes: Sequence[Any]) -> dict[int, list[Any]]:
    """Nodes of Inductor's scheduler by the groups in the names of their calls."""
    in_group = dict[int, list[Any]]()
    for node in nodes:
        if found := re.match(r"remat_group_(\d+)_", _origin_name(node.node)):
            in_group.setdefault(int(found[1]), []).append(node)
    return in_group


def _keep_order(nodes: Sequence[Any], in_group: Mapping[int, Sequence[Any]]) -> Any:
    """The nodes of Inductor's scheduler, of which each waits for the group before its own."""
    from torch._inductor.dependencies import WeakDep

    for before, i in itertools.pairwise(sorted(in_group)):
        ends = _read_outside(in_group[before])
        for node in in_group[i]:
            for name in ends - {dep.name for dep in node.unmet_dependencies}:
                node.add_fake_dep(WeakDep(name, node.get_name(), is_fake=True))
    scheduler = nodes[0].scheduler
    scheduler.nodes = scheduler.topological_sort_schedule(nodes)
    scheduler.compute_ancestors()
    return scheduler.nodes


def _origin_name(node: Any) -> str:
    """The name of the call whose result a node of Inductor's scheduler computes; '' if it is not known."""
    origin = node.get_origin_node() or next(iter(node.get_origins()), None)
    return "" if origin is None else origin.name


def _read_outside(group: Sequence[Any]) -> set[str]:
    """The buffers of nodes of Inductor's scheduler that others read; the last one if there are none.

    Nodes that run later may wait for these only: a buffer that nobody else waits for needs no memory.
    """
    own = {node.get_name() for node in group}
    outputs = [output for node in group for output in node.get_outputs()]
    read = {x.get_name() for x in outputs if any(user.get_name() not in own for user in x.users)}
    return read or {outputs[-1].get_name()}


Lowering = Callable[[_Partition], tuple[LoweredHalf, LoweredHalf]]


def lowering(graph: fx.GraphModule, example_inputs: Sequence[Any]) -> Lowering:
    """A function that shows what `inductor` generates for a partition; no kernel is compiled.

    Call this while Dynamo calls a backend, and the function at any time.
    """
    context, original = copy.copy(TracingContext.get()), fx.GraphModule(graph, _copied(graph.graph))

    def lowered(partition: _Partition) -> tuple[LoweredHalf, LoweredHalf]:
        again = fx.GraphModule(original, _copied(original.graph))
        with tracing_in(context), torch.enable_grad(), _only_code() as halves:
            inductor(again, example_inputs, partition)
        forward, backward = halves
        return forward, backward

    return lowered


def _copied(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, {}))
    return copied


@contextmanager
def _only_code() -> Iterator[list[LoweredHalf]]:
    """Let Inductor stop once it has written the code of a half, and note the code."""
    import torch._inductor.config
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    halves, groups = list[LoweredHalf](), dict[Any, Any]()

    class Reader(CustomSchedulerPass):
        def __call__(self, nodes: Any) -> Any:
            extern = tuple(any(each.is_extern() for each in node.get_nodes()) for node in nodes)
            groups[V.graph] = tuple(tuple(_buffers_of(node)) for node in nodes), extern
            return nodes

        def uuid(self) -> str:
            return "remat"

    def compile_to_module(self: Any) -> Any:
        source = self.codegen()[0].value
        buffers, is_extern = groups[self]
        names = tuple(self.graph_input_names), tuple(self.get_output_names())
        halves.append(LoweredHalf(source, buffers, is_extern, *names))
        return SimpleNamespace(call=None)

    compile_before = GraphLowering.compile_to_module
    GraphLowering.compile_to_module = compile_to_module
    try:
        with torch._inductor.config.patch(_post_fusion_custom_pass=Reader(), fx_graph_cache=False):
            yield halves
    finally:
        GraphLowering.compile_to_module = compile_before


def _buffers_of(group: Any) -> Iterator[Buffer]:
    """The buffers that a fused group of Inductor's scheduler fills."""
    from torch._inductor.ir import Layout, NonOwningLayout

    for node in group.get_nodes():
        for output in node.get_outputs():
            name = _origin_name(output.node) or _origin_name(node.node)
            layout = output.node.layout
            owns = isinstance(layout, Layout) and not isinstance(layout, NonOwningLayout)
            size = int(layout.storage_size()) * layout.dtype.itemsize if owns else 0
            yield Buffer(output.get_name(), name, output.node.get_origin_node() is not None, size)


def merge_equal_calls(module: fx.GraphModule) -> None:
    """Compute equal calls of a training graph once, as PyTorch's own partitioner does first."""
    from torch._functorch.compile_utils import fx_graph_cse

    end = module.graph.find_nodes(op="output")[0]
    module.graph.eliminate_dead_code()
    module.graph = fx_graph_cse(module.graph)
    module.graph.find_nodes(op="output")[0].meta.update(end.meta)


def module_path(node: fx.Node) -> str:
    """Path, in the model of a captured step, of the module whose forward function makes a node, or to whose backward
    pass it belongs; '' if none is known."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = str([*stack.values()][-1][0]) if stack else ""
    return path.partition(".model")[2].lstrip(".")


@contextmanager
def overridden(implementations: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Let composite ATen operators, by name, be other functions."""
    with torch.library._scoped_library("aten", "IMPL") as library, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they were registered before is the point
        for name, implementation in implementations.items():
            library.impl(name, implementation, "CompositeImplicitAutograd")
        yield
