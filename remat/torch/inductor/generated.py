"""What the code that Inductor generates does in a step, without running its kernels: bytes held, and calls to time.

The code of both halves runs on tensors without contents. Its kernels are replaced by stand-ins that note their
arguments; every other call is an ATen operator, which a fake tensor answers. Storages are followed from birth to death.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from remat.files import write_text
from remat.torch.internals.inductor import LoweredHalf
from remat.torch.internals.operators import FakeTensorMode
from remat.torch.measuring.plain import FollowedStep, Follower
from remat.torch.step.work import GENERATED, plain_form, tensors_of

_COMPILER = "AsyncCompile"  # the class that compiles the kernels of generated code


@dataclass(frozen=True, slots=True)
class KernelCall:
    """A call of a generated kernel.

    Attributes:
        half: 0 for forward, 1 for backward.
        signature: from which it can be rebuilt and timed.
        buffers: names of its arguments in the code.
    """

    half: int
    signature: str
    buffers: frozenset[str]


@dataclass(frozen=True, slots=True)
class FollowedCode(FollowedStep):
    """Calls of operators in generated code, in their order.

    Attributes:
        kernels: calls of generated kernels.
    """

    kernels: tuple[KernelCall, ...]

    @property
    def calls(self) -> list[str]:
        """Signatures of all calls that take time."""
        operators = (signature for signature in self.signatures if signature and "aten.empty" not in signature)
        return [*(kernel.signature for kernel in self.kernels), *operators]


class _Kernel:
    """A stand-in for a compiled kernel; it notes its calls."""

    def __init__(self, note: Callable[[_Kernel, tuple[Any, ...], Mapping[str, Any]], None]):
        self.name, self.note = "", note

    def __call__(self, *args: Any) -> None:
        self.note(self, args, {})

    def run(self, *args: Any, **kwargs: Any) -> None:
        self.note(self, args, kwargs)


class _Code:
    """The generated code of a half.

    Attributes:
        function: takes one list.
    """

    def __init__(self, half: int, source: str, folder: Path, calls: list[KernelCall]):
        self.half, self.calls, self.folder = half, calls, folder
        self.tree = ast.parse(source)
        space = self._executed()
        self.names = {name for name, value in space.items() if isinstance(value, _Kernel)}
        for name in self.names:
            space[name].name = name
        self.files = self._kernel_files()
        self.arguments = iter(self._arguments())
        self.function: Callable[[list[Any]], Any] = space["call"]

    def _executed(self) -> dict[str, Any]:
        """The names that the code defines, with stand-ins for kernels and for functions that fake tensors lack."""
        note = self._note

        class Compiler:
            def __getattr__(self, name: str) -> Any:
                return (lambda _: None) if name == "wait" else lambda *_args, **_kwargs: _Kernel(note)

        body = [node for node in self.tree.body if _COMPILER not in _imported(node)]
        space: dict[str, Any] = {"__name__": GENERATED, _COMPILER: Compiler}
        exec(compile(ast.Module(body, []), "<generated>", "exec"), space)
        for name in space:
            if name.startswith("empty_strided_"):
                space[name] = _maker_on(name.split("_")[2])
            elif name.startswith("assert_"):
                space[name] = lambda *_: None
        space["reinterpret_tensor"] = lambda x, size, stride, at: x.as_strided(size, stride, x.storage_offset() + at)
        return space

    def _note(self, kernel: _Kernel, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        plain = {"fw": "torch", "op": GENERATED, "file": self.files[kernel.name], "args": plain_form(list(args))}
        plain["kwargs"] = {key: plain_form(x) for key, x in kwargs.items() if key != "stream"}
        signature = json.dumps(plain, sort_keys=True, separators=(",", ":"))
        self.calls.append(KernelCall(self.half, signature, next(self.arguments)))

    def _arguments(self) -> list[frozenset[str]]:
        """Names in the arguments of each call of a kernel, in the code's order."""
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call) and self._is_kernel(node.func)]
        calls.sort(key=lambda node: node.lineno)
        return [frozenset(x.id for x in ast.walk(node) if isinstance(x, ast.Name)) - self.names for node in calls]

    def _is_kernel(self, called: ast.expr) -> bool:
        if isinstance(called, ast.Attribute) and called.attr == "run":
            called = called.value
        return isinstance(called, ast.Name) and called.id in self.names

    def _kernel_files(self) -> dict[str, str]:
        """A file for each kernel that begins to compile it as ``kernel``; equal kernels have one file."""
        lines = [ast.unparse(node) for node in self.tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        head = "\n".join([*lines, f"async_compile = {_COMPILER}()"])
        files = {}
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if name in self.names:
                    text = f"{head}\nkernel = {ast.unparse(node.value)}\n"
                    path = self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.py"
                    if not path.exists():
                        write_text(path, text)
                    files[name] = str(path)
        return files


def _imported(node: ast.stmt) -> Collection[str]:
    return {name.name for name in node.names} if isinstance(node, ast.ImportFrom) else ()


def _maker_on(device: str) -> Callable[..., Tensor]:
    def empty(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(size, stride, dtype=dtype, device=device)

    return empty


def follow(
    halves: Sequence[LoweredHalf], primals: Sequence[fx.Node], tangents: Sequence[fx.Node], n_outputs: int,
    loss_bytes: int, held_bytes: int, folder: Path,
) -> FollowedCode:  # fmt: skip
    """Follow a step of generated code.

    Args:
        primals, tangents: placeholders of the training graph.
        n_outputs: of the forward half, before the saved tensors.
        loss_bytes: that a loss outside of the module holds between both halves, beside gradients of outputs.
        held_bytes: the part of these that it holds to the end of the step.
        folder: for files of the kernels.
    """
    calls, mode = list[KernelCall](), FakeTensorMode(allow_non_fake_inputs=True)
    forward, backward = (_Code(half, each.source, folder, calls).function for half, each in enumerate(halves))
    with mode:
        args = [_bare(node) for node in primals]
    follower = Follower(args)
    with torch.no_grad(), mode, follower:
        made = list(forward([*args]))
        outputs, saved = made[:n_outputs], made[n_outputs:]
        del made
        with follower.holding(loss_bytes):
            saved += [_bare(node) for node in tangents]
        follower.hold(held_bytes)
        gradients = backward(saved)
    del outputs, gradients
    return FollowedCode(tuple(follower.signatures), tuple(follower.held), tuple(calls))


def _bare(node: fx.Node) -> Tensor:
    (x,) = tensors_of(node.meta["val"])
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
