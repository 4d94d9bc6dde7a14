"""Dynamo: what it traces of a model, and what it notes."""

# ruff: noqa: F401 - other modules import these names from here

from __future__ import annotations

import dis
import functools
import logging
import os
import re
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch._functorch import config as functorch_config
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from remat.torch.internals.autograd import storage_key, version_of
from remat.torch.internals.notes import Modules, _named, example_of
from remat.torch.internals.operators import outside_modes, patched, replaced, schema_of


def tracing_shown(traced_at: Iterable[Place] | None = None) -> AbstractContextManager[None]:
    """Let models that ask whether they are being traced hear that they are, without a compiler.

    Args:
        traced_at: where they hear so, as noted by `as_in_eager_mode`; by default everywhere.
    """
    places = [_in_models(place[:-1]) for place in traced_at or ()]  # the last line of a place called the model

    def answer() -> bool:
        place = _in_models((frame.f_code.co_filename, at) for frame, at in traceback.walk_stack(sys._getframe(1)))
        return traced_at is None or any(place[: len(each)] == each for each in places)

    return patched(torch.compiler, is_compiling=answer)


def _in_models(place: Iterable[tuple[str, int]]) -> Place:
    """A place without PyTorch's own lines."""
    own = os.path.dirname(torch.__file__)
    return tuple((file, line) for file, line in place if not file.startswith(own))


@contextmanager
def compiler_settings(most_graphs: int) -> Iterator[None]:
    """The compiler's settings for capturing and executing steps.

    Recurrent layers are let through. Up to `most_graphs` shapes and modes may each have their graph.
    DistributedDataParallel must not cut graphs into buckets. Dynamo notices hooks that are added later. The backward
    pass does not cast, as in eager mode, even if the forward pass runs under autocast. An operator that refuses its
    arguments raises without a traceback in PyTorch's log. Calls that only write messages or mark ranges for a profiler
    are left out. A model may differentiate in `forward`. NumPy's random numbers are refused; by default they become
    PyTorch's.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    ignored = {_IGNORED: getattr(torch._dynamo.config, _IGNORED) | _calls_without_result(len(vars(logging.Logger)))}
    with replaced(log, disabled=True), functorch_config.patch(backward_pass_autocast="off"), torch._dynamo.config.patch(
        allow_rnn=True, recompile_limit=most_graphs, accumulated_recompile_limit=4 * most_graphs, optimize_ddp=False,
        skip_nnmodule_hook_guards=False, trace_autograd_ops=True, use_numpy_random_stream=True, **ignored,
    ):  # fmt: skip
        yield


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
class TraceSettings:
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
        traced_at: places at which it hears the truth.
        asked: where it asked last, and did not hear the truth.
        values: of the arguments, on which the model may branch; None if they are not known.
        settings: the compiler's, entered whenever it compiles.
    """

    as_in_eager_mode = False
    traced_at: Container[Place] = ()
    asked: Place | None = None
    values: Any = None
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext


tracing = _Tracing()


@contextmanager
def as_in_eager_mode(
    traced_at: Container[Place], values: Any, settings: Callable[[], AbstractContextManager[Any]]
) -> Iterator[None]:
    """Let Dynamo trace what a model does in eager mode; `settings` are entered only while it does, not in each step.

    - Models that ask whether they are being traced hear that they are not. At the places `traced_at` they
      hear the truth, as PyTorch's own modules do: what these do instead gives the same results.
    - A branch on the value of a tensor that depends on no tensor from outside is followed, e.g. of one made of
      `torch.arange`: it has the same contents in each call.
    - A branch on `values` is followed too, see `remat.torch.step.branches`.
    - A tensor that the model has made may be set to require a gradient, see `_let_leaves_through`.
    - Python's random generators in objects are refused: Dynamo would repeat the numbers of the first call.
    - A Function of the user's that distinguishes missing gradients from zeros is refused: Dynamo gives it zeros.
    - A refusal notes in which module it stops, for `modules_at`.
    """
    _extend_dynamo()
    with replaced(tracing, as_in_eager_mode=True, traced_at=traced_at, asked=None, values=values, settings=settings):
        yield


@functools.cache
def _extend_dynamo() -> None:
    _answer_questions()
    _follow_more()
    _let_leaves_through()
    _refuse_generators()
    _note_modules()
    _note_writes()
    _refuse_missing_gradients()
    _enter_settings()
    _recompile_without_reason()


def _recompile_without_reason() -> None:
    """Let one code be compiled for another model, too.

    PyTorch words why what it compiled before does not serve: it reads the new model at the first one's places. Where it
    finds none there, it raises; it has words of its own for a compilation without a reason.
    """
    from torch._dynamo import convert_frame

    name = "get_and_maybe_log_recompilation_reasons"  # imported there, not exported
    reasons_of = getattr(convert_frame, name)

    def reasons(*args: Any, **kwargs: Any) -> list[str]:
        try:
            return reasons_of(*args, **kwargs)
        except (LookupError, AttributeError):
            return []

    setattr(convert_frame, name, reasons)


def _enter_settings() -> None:
    """Let Dynamo compile under the settings of this thread's call; calls whose code is compiled do not come here."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    compile_frame = CatchErrorsWrapper.__call__

    def within(self: Any, *args: Any) -> Any:
        with tracing.settings():
            return compile_frame(self, *args)

    setattr(CatchErrorsWrapper, "__call__", within)  # noqa: B010 - its type is narrower


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
        if is_own or place in tracing.traced_at or not tracing.as_in_eager_mode:
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


def _refuse_generators() -> None:
    from torch._dynamo.variables.misc import RandomVariable

    is_followed = RandomVariable.is_supported_random_obj

    def none(generator: Any) -> bool:
        return not tracing.as_in_eager_mode and is_followed(generator)

    setattr(RandomVariable, "is_supported_random_obj", staticmethod(none))  # noqa: B010 - its type is narrower


MISSING_GRADIENTS = "calls ctx.set_materialize_grads(False) and has several outputs"


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
        read = [x for before in each.all_input_nodes for x in tree_leaves(example_of(before))]
        if _writes(each) and any(_is_held(x) and storage_key(x) in storages for x in read):
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
    return None if any(x.is_inference() for x in tensors) else [version_of(x) for x in tensors]


def _writes(node: fx.Node) -> bool:
    """Whether a call of Dynamo's graph may change its arguments."""
    schemas = [schema_of(node.target)] if isinstance(node.target, OpOverload) else []
    return not node.meta.get(_READS_ONLY) or any(schema.is_mutable for schema in schemas)


def leave_alone(function: Any) -> None:
    """Keep Dynamo from compiling calls of this function; it still looks inside where it compiles the caller."""
    skip_code(function.__code__)


def compiler_is_disabled() -> bool:
    """Whether ``TORCHDYNAMO_DISABLE`` or the setting behind it is on."""
    return torch._dynamo.config.disable


def compiler_stance() -> str:
    """The last argument of `torch.compiler.set_stance`."""
    return torch._dynamo.eval_frame._stance.stance
