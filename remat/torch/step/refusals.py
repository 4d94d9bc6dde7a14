"""Refusals of a step, each an `InvalidInput` of one line: what stops it, where in the user's code, and the way out."""

from __future__ import annotations

import inspect
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from remat.errors import InvalidInput, RematError, headline, shortened
from remat.graph import reached
from remat.torch.internals.autograd import BatchNorm, backward_hooks, storage_key
from remat.torch.internals.dynamo import (
    MISSING_GRADIENTS,
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    modules_at,
)
from remat.torch.internals.notes import (
    Modules,
    differentiated_output,
    example_of,
    is_function,
    is_in_backward,
    is_tangent,
    modules_of,
    mutated_input,
)
from remat.torch.internals.operators import FakeTensor, consists_of_tensors, is_symbol
from remat.torch.step.work import tensors_of

MOST_GRAPHS = 256
PARTS = "give parts=[names of submodules]"
UNLESS = f"change that until torch.compile(model, fullgraph=True) accepts it, or {PARTS}"
_ONE_GRAPH = "the model does not compile into one graph"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_REMAT, _TORCH, _PYTHON = (
    str(Path(folder) / "_")[:-1]
    for folder in (Path(__file__).parents[1], Path(torch.__file__).parent, sysconfig.get_path("stdlib"))
)
# What headlines of the compiler contain, in words that say what the model does ('' for its own), and the way out.
_LEAF = ("the model lets an argument require a gradient", "call requires_grad_() on it before the module")
_MEANINGS = {
    "Could not guard on data-dependent expression": ("a branch or a size depends on values", UNLESS),
    "Unsupported Tensor.requires_grad_() call": _LEAF,
    "setattr() on Tensor.requires_grad": _LEAF,
    "attempted to trace torch._numpy.random": ("the model draws NumPy's random numbers", f"draw PyTorch's, or {PARTS}"),
    "returning intermediate with requires_grad_()": (
        "the model returns a tensor for which it called requires_grad_()", "make that tensor outside, as an argument",
    ),
    MISSING_GRADIENTS: ("", f"leave set_materialize_grads out, so that missing gradients are zeros, or {PARTS}"),
}  # fmt: skip


@contextmanager
def refusals(what: str) -> Iterator[None]:
    """Turn a refusal of the compiler into an `InvalidInput` of one line, which begins with `what`.

    Raises:
        InvalidInput: the step cannot be captured in one graph.
    """
    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, RematError):
            raise error.inner_exception from None
        raise InvalidInput(f"{what}: {headline(error.inner_exception)}") from error
    except FailOnRecompileLimitHit as error:
        raise InvalidInput(
            f"{what}: the model has been compiled for {MOST_GRAPHS} different shapes, modes or Python values; "
            "pad inputs to few shapes, and pass numbers that change as tensors"
        ) from error
    except TorchDynamoException as error:
        where = place_of(str(error).partition("from user code:")[2], modules_at(error))
        if "fake tensor call" in headline(error):
            raise InvalidInput(f"the model does not take these arguments: {_why(error)}{where}") from error
        reason, instead = _reason(error)
        raise InvalidInput(f"{_ONE_GRAPH}: {reason}{where}; {instead}") from error


def _reason(error: BaseException) -> tuple[str, str]:
    """The compiler's headline with its reason if it gives one, and the way out."""
    line, why = headline(error), _why(error)
    for words, (meaning, instead) in _MEANINGS.items():
        if words in line:
            return meaning or line, instead
    return f"{line} ({why})" if why else line, UNLESS


def _why(error: BaseException) -> str:
    """The error that the model raised if there is one, else the compiler's explanation."""
    text, line = str(error), headline(error)
    errors = re.findall(r"got (\w+(?:Error|Exception)\(.*)", text)
    lines = [each.strip() for each in text.splitlines()]
    errors += [each for each in lines if re.search(r"\w(Error|Exception)\b", each) and shortened(each) != line]
    explained = (each.removeprefix("Explanation:") for each in lines if each.startswith("Explanation:"))
    why = next(iter(errors), "") or next(explained, "")
    return shortened(why.strip().removeprefix("Developer debug context:"), 240)


def place_of(stack: str, modules: Modules = ()) -> str:
    """Where the model's code stops, as the end of a sentence: the user's line, and the module.

    Args:
        stack: frames as Python prints them, the innermost last.
        modules: that are running, the innermost last.
    """
    frames = [frame for frame in _FRAME.findall(stack) if not frame[0].startswith(_REMAT)]
    outside = [frame for frame in frames if not _is_of_the_language(frame[0])]
    own = [frame for frame in outside if not _INSTALLED.search(frame[0])]
    root, innermost = (modules[0][0], modules[-1][0]) if modules else ("", "")
    name = innermost.removeprefix(root).lstrip(".") if innermost.startswith(root) else ""
    shown = (own or outside or ([] if modules else frames))[-1:]
    words = [f"at line {line} of {file} (in {function})" for file, line, function in shown]
    if shown and outside and outside[-1] != shown[0]:
        file, line, _ = outside[-1]
        words.append(f"which reaches line {line} of {_INSTALLED.split(file)[-1]}")
    if name:
        words.append(f"in the module '{name}' ({modules[-1][1]})")
    return "".join(f", {each}" for each in words)


def _is_of_the_language(file: str) -> bool:
    """Whether a file belongs to PyTorch or to Python itself."""
    return file.startswith(_TORCH) or (file.startswith(_PYTHON) and not _INSTALLED.search(file))


def check_sample_args(given: object) -> None:
    """Refuse arguments of a model that are no tuple."""
    if not isinstance(given, tuple):
        raise InvalidInput("sample_args must be a tuple of the model's positional arguments, e.g. (x,)")


def check_sizes(module: fx.GraphModule) -> None:
    """Refuse a training graph in which sizes, or numbers that both passes read, depend on values of tensors."""
    calls = [node for node in module.graph.nodes if node.op == "call_function"]
    given = (node for node in module.graph.find_nodes(op="placeholder") if not is_tangent(node))
    if any(is_symbol(size) for node in given for size in _sizes_of(node)):
        raise InvalidInput(
            "a size of an argument is marked as dynamic (torch._dynamo.mark_dynamic): unmark it, because a plan is of "
            "one size; pad to few sizes, and give these to prepare(...), which plans each"
        )
    sized = (node for node in calls if any(map(is_symbol, _sizes_of(node))))
    numbers = (node for node in calls if is_symbol(node.meta.get("val")) and any(map(is_in_backward, node.users)))
    if (node := next(sized, None)) is not None:
        what = f"the size of a tensor depends on values ({node.target})"
        instead = "keep sizes fixed (torch.where, or a mask that multiplies)"
    elif (node := next(numbers, None)) is not None:
        what = "the backward pass reads a number that is the value of a tensor"
        instead = "let it stay a tensor (leave .item() out)"
    else:
        return
    where = place_of(node.stack_trace or "", modules_of(node))
    raise InvalidInput(f"{_ONE_GRAPH}: {what}{where}; {instead}, or {PARTS}")


def check_subgraphs(module: fx.GraphModule) -> None:
    """Refuse a training graph with calls that run graphs of their own, e.g. `torch.cond`."""
    for node in module.graph.find_nodes(op="get_attr"):
        if isinstance(getattr(module, str(node.target), None), fx.GraphModule):
            call = next(iter(node.users))
            where = place_of(call.stack_trace or "", modules_of(call))
            raise InvalidInput(
                f"{_ONE_GRAPH}: no plan can follow {call.target}, which runs a graph of its own{where}; leave it out "
                f"(e.g. torch.where in place of torch.cond), or {PARTS}"
            )


def check_functions(graph: fx.GraphModule) -> None:
    """Refuse outputs that are views made by a `torch.autograd.Function` of another output or of an argument.

    AOT autograd makes such an output again, as a view that knows nothing of the Function's backward pass.

    Args:
        graph: of Dynamo.
    """
    outputs = [x for x in graph.graph.find_nodes(op="output")[0].args[0] if isinstance(x, fx.Node)]
    others = {*outputs, *graph.graph.find_nodes(op="placeholder")}
    for i, output in enumerate(outputs, 1):
        chain = _same_storage(output)
        beside = (x for x in others - chain if _storage_of(x) == _storage_of(output))
        if any(map(is_function, chain)) and any(beside):
            raise InvalidInput(
                f"output {i} of the model is a view, made by a torch.autograd.Function, of another output or of an "
                "argument, so that the Function's backward pass would be lost: return x.clone() in its forward"
            )


def _same_storage(node: fx.Node) -> set[fx.Node]:
    """The node and those before it back to the last `torch.autograd.Function`, as long as the storage is the same."""

    def before(x: fx.Node) -> list[fx.Node]:
        read = [] if is_function(x) else x.all_input_nodes
        return [y for y in read if is_function(y) or _storage_of(y) == _storage_of(node)]

    return {*reached([node], before)}


def _storage_of(node: fx.Node) -> int | None:
    example = example_of(node)
    return storage_key(example) if isinstance(example, Tensor) and example.layout is torch.strided else None


def _sizes_of(node: fx.Node) -> list[Any]:
    return [size for x in tensors_of(node.meta.get("val")) for size in x.shape]


def check_own_tensors(model: nn.Module) -> None:
    """Refuse buffers that are more than strided tensors, and parameters that consist of several."""
    for name, x in model.named_parameters():
        if consists_of_tensors(x):
            raise InvalidInput(f"the parameter '{name}' is a {type(x).__name__}, which no plan can follow")
    for name, x in model.named_buffers():
        if what := _more_than_a_tensor(x):
            raise InvalidInput(f"the buffer '{name}' is {what[0]}, which no plan can follow: {what[1]}")


def check_given_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], leaves: Sequence[Any] | None = None
) -> None:
    """Refuse arguments of the model that hold more than strided tensors; `leaves` are theirs, if they are known."""
    leaves = tensors_of((args, kwargs)) if leaves is None else leaves
    if not any(isinstance(x, Tensor) and _more_than_a_tensor(x) for x in leaves):
        return
    try:
        named = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    except TypeError:
        named = {**dict(enumerate(args)), **kwargs}
    for name, given in named.items():
        for what in filter(None, map(_more_than_a_tensor, tensors_of(given))):
            raise InvalidInput(f"the argument '{name}' holds {what[0]}, which no plan can follow: {what[1]}")


def _more_than_a_tensor(x: Tensor) -> tuple[str, str] | None:
    """(what it is, what to pass instead) of a tensor that is not a plain one."""
    if x.is_nested:
        return "a nested tensor", "pass x.to_padded_tensor(0.0) and a mask"
    if x.layout is not torch.strided:
        return f"a tensor of layout {x.layout}", "pass its indices and values, or x.to_dense()"
    if type(x) in (Tensor, nn.Parameter) or isinstance(x, FakeTensor):
        return None
    return f"a {type(x).__name__}, a subclass of Tensor", "pass x.as_subclass(torch.Tensor)"


def check_history(model: nn.Module, primals: Sequence[Any], tangents: Sequence[fx.Node]) -> None:
    """Refuse a training graph that differentiates what it writes into a buffer.

    Args:
        primals, tangents: of the training graph.
    """
    written = [mutated_input(differentiated_output(tangent)) for tangent in tangents]
    differentiated = {id(primals[i]) for i in written if i is not None}
    _refuse_history(name for name, x in model.named_buffers() if id(x) in differentiated)


def check_buffers(model: nn.Module) -> None:
    """Refuse a model with a buffer that depends on its parameters after a forward pass."""
    _refuse_history(name for name, x in model.named_buffers() if not x.is_leaf)


def _refuse_history(buffers: Iterable[str]) -> None:
    for name in buffers:
        raise InvalidInput(
            f"the buffer '{name}' keeps the gradient history of a step, so that the next backward pass would go "
            "through it again: write values without history into it, e.g. h.detach()"
        )


@contextmanager
def causes(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """If the compiler refuses a call inside, look for the cause in the model and in the arguments.

    Raises:
        InvalidInput: names the cause if it is known, else the compiler's own.
    """
    try:
        yield
    except InvalidInput:
        check_momentum(model)
        _check_hooks(model)
        _check_arguments(model, args, kwargs)
        raise


def check_momentum(model: nn.Module) -> None:
    """Refuse batch norms that average over all steps: each step computes their factor from a tensor."""
    for name, module in model.named_modules():
        averages = isinstance(module, BatchNorm) and module.training and module.track_running_stats
        if averages and module.momentum is None:
            raise InvalidInput(
                f"{name or 'the model'} ({type(module).__name__}) has momentum=None, which cannot be compiled: "
                "set its momentum to a number, e.g. 0.1"
            )


def _check_hooks(model: nn.Module) -> None:
    """Refuse hooks on the backward passes of modules."""
    if backward_hooks():
        raise InvalidInput("backward hooks of all modules (register_module_...) cannot be compiled: remove them")
    for name, module in model.named_modules():
        if backward_hooks(module):
            instead = "call output.register_hook in a forward hook" if name else "register it on the planned module"
            raise InvalidInput(
                f"{name or 'the model'} ({type(module).__name__}) has a backward hook, which cannot be compiled: "
                f"remove it, or {instead}"
            )


def _check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments that the model's `forward` does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = f"{type(model).__name__}.forward{signature}"
        raise InvalidInput(f"{name} does not take these arguments: {error}") from None
