"""The graph of a deep step from that of a shallow one: a few of the equal blocks are captured, and repeated.

Capture takes time in proportion to depth; a transformer's blocks are equal. The model gets fewer of them for a while.
That is sound if both passes of the deep model, followed call by call on tensors without contents, are the shallow
one's with further blocks, and if the shallow graph is that of fewer blocks with copies. Both are checked.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from remat.errors import InvalidInput, first_line
from remat.graph import Graph
from remat.search.repeats import Repeats, find_repeats, with_blocks
from remat.torch.internals.autograd import cut_to, storage_key
from remat.torch.internals.operators import ASKS_DEVICE, TorchDispatchMode
from remat.torch.measuring.plain import FollowedStep, plain_step
from remat.torch.step.loss import Needs, Outside
from remat.torch.step.work import storage_bytes, tensors_of

SHALLOW = 6  # blocks of the shallow model; a few at both ends may differ from the rest in the graph
FEWEST = 4  # blocks that are followed first: one at an end may run otherwise
EQUAL = 3  # blocks between them that suffice where the form is known: the middle one has neighbours of its kind
LEAST = 12  # blocks from which the shallow captures are faster than one of the whole model

Described = tuple[Graph, tuple[str, ...]]  # the graph of a step; [V] path of the module that makes each value


@dataclass(frozen=True, slots=True)
class Row:
    """Equal blocks of a model that stand in a row.

    Attributes:
        path: of the container; the blocks are its children 0, 1, ...
    """

    model: nn.Module
    path: str

    @classmethod
    def of(cls, model: nn.Module) -> Row | None:
        """The longest row of at least `LEAST` blocks; None if there is none."""
        rows = [
            (len(module), name)
            for name, module in model.named_modules()
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) >= LEAST and _are_alike(model, module)
        ]
        return cls(model, max(rows)[1]) if rows else None

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks."""
        return [*self.model.get_submodule(self.path).children()]

    def cut_to(self, n_blocks: int) -> AbstractContextManager[None]:
        """Let the model have its first blocks only."""
        return cut_to(self.model.get_submodule(self.path), n_blocks)

    def bytes_after(self, n_blocks: int) -> int:
        """Bytes of parameters and buffers of all blocks but the first `n_blocks`."""
        rest = self.blocks[n_blocks:]
        tensors = [x for block in rest for x in (*block.parameters(), *block.buffers())]
        return sum({storage_key(x): storage_bytes(x) for x in tensors}.values())


def has_long_row(model: nn.Module) -> bool:
    """Whether so many modules with parameters stand in a row that copies would be worth it."""
    rows = (module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    return any(sum(any(True for _ in block.parameters()) for block in row) >= LEAST for row in rows)


def _are_alike(model: nn.Module, blocks: nn.Module) -> bool:
    """Whether the blocks have one class, parameters of the same shapes and types, and share none."""
    first, *others = [
        (type(block), [(name, x.shape, x.dtype, x.requires_grad) for name, x in _tensors(block)])
        for block in blocks.children()
    ]
    keys = [storage_key(x) for block in blocks.children() for _, x in _tensors(block)]
    places = [storage_key(x) for module in model.modules() for x in (*module.parameters(False), *module.buffers(False))]
    used = dict.fromkeys(keys, 0)
    for key in places:
        if key in used:
            used[key] += 1
    return bool(first[1]) and all(other == first for other in others) and set(used.values()) == {1}


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


class Repeated:
    """A deep step of whose blocks only a few are captured.

    Attributes:
        n_captured, shallow, modules: so many blocks, the captured step with them.
        repeats: the equal blocks in it; None: there are none.
        followed: the deep step, if blocks were checked.
        copies: where the calls of its blocks are, if they were checked, and its bytes follow from the shallow step's.
    """

    def __init__(
        self, row: Row, capture: Callable[[], Described], like: Repeated | None = None,
        followed: FollowedStep | None = None, copies: Copies | None = None,
    ) -> None:  # fmt: skip
        """Capture `SHALLOW` blocks; fewer if the step has the form of another one (`like`), at another size perhaps."""
        self.row, self.followed, self.copies = row, followed, copies
        if like is not None and like.repeats is not None:
            self.n_captured = SHALLOW - like.repeats.n_blocks + EQUAL
            with row.cut_to(self.n_captured):
                self.shallow, self.modules = capture()
            self.repeats = replace(_moved(like.repeats, like.shallow, self.shallow), n_blocks=EQUAL)
            if _kinds(self.shallow) == like.kinds_with_equal_blocks():
                return
            self.repeats = find_repeats(self.shallow, EQUAL)  # around them other operations may run at another size
            if self.repeats is not None:
                return
        self.n_captured = SHALLOW
        with row.cut_to(SHALLOW):
            self.shallow, self.modules = capture()
        self.repeats = find_repeats(self.shallow)

    @classmethod
    def of(cls, row: Row, capture: Callable[[], Described], step: nn.Module, args: tuple[Any, ...]) -> Repeated:
        """After a check that blocks may be repeated.

        Args:
            capture: captures `step`, whose model has the row, on `args`.

        Raises:
            InvalidInput: they may not, and why.
        """
        deep, followed = _calls(step, args)
        few, is_known = None, False
        for n_blocks in (FEWEST, SHALLOW):
            few = _followed_few(row, n_blocks, deep, step, args) or few
            is_known = few is not None and few[0].deepened(few[1]) == [*followed.held_bytes]
            if is_known:
                break
        if few is None:
            raise InvalidInput("its blocks do not run the same operations")
        made = cls(row, capture, None, followed, few[0] if is_known else None)
        if made.repeats is None:
            raise InvalidInput("its operations do not repeat")
        fewer = cls(row, capture, made)
        if fewer.n_captured == SHALLOW or _facts(fewer.graph(SHALLOW)[0]) != _facts(made.shallow):
            raise InvalidInput("a further block changes more than one block of the step")
        return made

    def with_turn(self, described: Described) -> Repeated:
        """The same blocks, in a step that differs between their forward and their backward passes."""
        made = copy(self)
        made.shallow, made.modules = described
        made.repeats = None if self.repeats is None else _moved(self.repeats, self.shallow, made.shallow)
        return made

    def kinds_with_equal_blocks(self) -> list[str]:
        """[operation] its kind, in the step in which `EQUAL` blocks stand for all that are equal."""
        assert self.repeats is not None
        left_out = {
            k
            for b in range(self.repeats.n_blocks - EQUAL)
            for k in (*self.repeats.forward_of(b), *self.repeats.backward_of(b))
        }
        return [kind for k, kind in enumerate(_kinds(self.shallow)) if k not in left_out]

    def graph(self, n_blocks: int) -> Described:
        """The step with so many blocks.

        Raises:
            InvalidInput: its operations do not repeat.
        """
        if self.repeats is None:
            raise InvalidInput("its operations do not repeat")
        more = n_blocks - self.n_captured
        deep, copied, moved = with_blocks(self.shallow, self.repeats, self.repeats.n_blocks + more)
        further = self.row.bytes_after(self.n_captured) - self.row.bytes_after(n_blocks)
        paths = self._paths(copied, moved, more)
        return deep.resized(fixed_bytes=deep.fixed_bytes + further), paths

    def _paths(self, copied: Sequence[int], moved: Sequence[int], more: int) -> tuple[str, ...]:
        """[value] path of its module, whose number moves as its block does."""
        modules = self.modules
        number = re.compile(rf"^{re.escape(self.row.path)}\.(\d+)(?=\.|$)")

        def path(v: int, move: int) -> str:
            found = number.match(modules[v])
            if found is None:
                return modules[v]
            at = int(found[1])
            if not move and at > self.n_captured // 2:  # after the copies, and in no block of the graph
                move = more
            return f"{self.row.path}.{at + move}{modules[v][found.end() :]}"

        return tuple(path(v, move) for v, move in zip(copied, moved, strict=True))


def _kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.operations]


def _moved(repeats: Repeats, graph: Graph, other: Graph) -> Repeats:
    """The blocks of a graph in another one, longer or shorter only between their forward and backward passes."""
    return replace(repeats, backward=repeats.backward + len(other) - len(graph))


def _facts(graph: Graph) -> tuple[Any, ...]:
    operations = [
        (op.kind, op.inputs, op.outputs, op.workspace_bytes, op.is_backward, op.run_once,
         op.work and (op.work.flops, op.work.bytes_moved))
        for op in graph.operations
    ]  # fmt: skip
    return operations, [(value.bytes, value.keep) for value in graph.values], graph.fixed_bytes, graph.loss


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a step: the operator, [tensor it makes] shape and type, [tensor it reads] calls since."""

    operator: str
    outputs: tuple[Any, ...]
    inputs: tuple[int, ...]


_PROPERTY = _Call("property", (), ())


class _Calls(TorchDispatchMode):
    """Notes calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[_Call]()
        self.made: dict[int, int] = {}  # storage that is there -> the call that made it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is ASKS_DEVICE:
            self.found.append(_PROPERTY)
            return made
        outputs, at = tensors_of(made), len(self.found)
        read = tuple(at - self.made.get(storage_key(x), at) for x in tensors_of((args, kwargs)))  # 0: from outside
        self.found.append(_Call(str(func), tuple((tuple(x.shape), x.dtype) for x in outputs), read))
        for x in outputs:
            key = storage_key(x)
            if key not in self.made:
                self.made[key] = at
                weakref.finalize(x.untyped_storage(), self.made.pop, key, None)  # another may take its place
        return made


Passes = tuple[list[_Call], list[_Call]]  # calls of the forward pass, of the backward pass


def _calls(step: nn.Module, args: tuple[Any, ...]) -> tuple[Passes, FollowedStep]:
    """((calls of the forward pass, of the backward pass), the step).

    Raises:
        InvalidInput: the step does not run on tensors without contents.
    """
    calls, end = _Calls(), [0]

    def at_loss(_: Sequence[Tensor], __: bool) -> Needs:
        end[0] = len(calls.found)
        return Needs()

    try:
        followed = plain_step(step, args, {}, Outside(taken=at_loss), lambda _: calls.found.clear(), calls)
    except Exception as error:  # fake tensors do not support everything that can be captured
        raise InvalidInput(f"it cannot be followed: {first_line(error)}") from error
    return (calls.found[: end[0]], calls.found[end[0] :]), followed


@dataclass(frozen=True, slots=True)
class Copies:
    """The bytes that a deep step holds during each of its calls, from those of a shallow one.

    Attributes:
        n_blocks: of the shallow one.
        more: further blocks.
        forward, backward: (the call before which the copies stand, calls of a block) in each pass. The copies stand in
            the middle of a block: at its end the step holds what the code around the blocks holds.
    """

    row: Row
    n_blocks: int
    more: int
    forward: tuple[int, int]
    backward: tuple[int, int]

    def are_equal(self, signatures: Sequence[str]) -> bool:
        """Whether the blocks of a shallow step, at another size perhaps, still run the same calls.

        Args:
            signatures: [calls of the shallow step].
        """
        return all(
            signatures[end - i * n : end - (i - 1) * n] == signatures[end - n : end]
            for end, n in (self.forward, self.backward)
            for i in range(2, self.n_blocks - 1)
        )

    def deepened(self, held: Sequence[int]) -> list[int]:
        """[calls of the deep step] bytes; each copy of a block adds what the copied one does."""
        deep, start, offset = list[int](), 0, 0
        for end, n_block in (self.forward, self.backward):
            deep += (n + offset for n in held[start:end])
            each = held[end - 1] - held[end - 1 - n_block] if end > n_block else 0
            for i in range(self.more):
                deep += (n + offset + (i + 1) * each for n in held[end - n_block : end])
            start, offset = end, offset + self.more * each
        return [*deep, *(n + offset for n in held[start:])]


def _followed_few(
    row: Row, n_blocks: int, deep: Passes, step: nn.Module, args: tuple[Any, ...]
) -> tuple[Copies, Sequence[int]] | None:
    """(where the blocks of the deep step are, [calls] bytes of the shallow one), if the deep one goes on as it does."""
    with row.cut_to(n_blocks):
        shallow, followed = _calls(step, args)
    more = len(row.blocks) - n_blocks
    forward, backward = (_goes_on(a, b, more) for a, b in zip(shallow, deep, strict=True))
    if forward is None or backward is None:
        return None
    (at, n), (at_back, n_back) = forward, backward
    places = (at - n // 2, n), (len(shallow[0]) + at_back - n_back // 2, n_back)
    return Copies(row, n_blocks, more, *places), followed.held_bytes


def _goes_on(shallow: Sequence[_Call], deep: Sequence[_Call], more: int) -> tuple[int, int] | None:
    """(the call behind the last block of `shallow`, calls of a block), if `deep` is `shallow` with further blocks."""
    n_block, rest = divmod(len(deep) - len(shallow), more)
    if rest or n_block <= 0:
        return None

    def near(calls: Sequence[_Call]) -> list[Any]:
        """What is read from further back than two blocks counts as one."""
        return [(c.operator, c.outputs, tuple(min(d, 2 * n_block + 1) for d in c.inputs)) for c in calls]

    one, other = near(shallow), near(deep)
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
    end = at + more * n_block
    goes_on = at >= n_block and other[at:end] == one[at - n_block : at] * more and other[end:] == one[at:]
    return (at, n_block) if goes_on else None
