"""What a model keeps in Python attributes: put back after every run of its code that is not a step of the user's."""

from __future__ import annotations

import inspect
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from remat.execution import Planned
from remat.torch.internals.autograd import storage_key, version_of
from remat.torch.step.work import storage_bytes

DEEPEST = 2  # objects within objects, e.g. a cache and its layers; what is further away is not the model's
_CONTAINERS = (dict, list, deque, set)
_WITHOUT_STATE = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, property,
    str, bytes, int, float, complex, type(None), range, slice,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Slots:
    """The attributes of an object that are in slots, as a container of names and values."""

    owner: Any
    slots: dict[str, Any]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        for name, slot in self.slots.items():
            with suppress(AttributeError):  # a slot that holds nothing
                yield name, slot.__get__(self.owner)

    def fill(self, held: list[tuple[str, Any]]) -> None:
        for name in dict(self).keys() - dict(held).keys():
            self.slots[name].__delete__(self.owner)
        for name, x in held:
            self.slots[name].__set__(self.owner, x)


def _slots(x: Any) -> dict[str, Any]:
    """[name] the descriptor of each slot of an object."""
    kinds = reversed([kind for kind in type(x).__mro__ if "__slots__" in vars(kind)])
    return {name: slot for kind in kinds for name, slot in vars(kind).items() if inspect.ismemberdescriptor(slot)}


@dataclass(frozen=True, slots=True)
class _Container:
    """A container and what was in it.

    Attributes:
        held: [items], of a dict with their keys.
        is_of_module: it has a module's attributes.
    """

    container: Any
    held: list[Any]
    is_of_module: bool

    def put_back(self, keeps_flags: bool) -> None:
        now, held = _held(self.container), self.held
        if keeps_flags and self.is_of_module:
            flags = {name: x for name, x in now if isinstance(x, bool)}
            held = list((dict(held) | flags).items())
        if len(now) != len(held) or any(not _is_same(x, y) for x, y in zip(now, held, strict=True)):
            _fill(self.container, held)


class State:
    """What the attributes of a model's modules hold, its tables of parameters and of buffers included.

    Attributes:
        tensors: in attributes, and in containers and objects there.
    """

    def __init__(self, model: nn.Module):
        self._seen = dict[int, Any]()  # keeps objects alive, so that no other takes an identity
        self._containers = list[_Container]()
        self._arrays = list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]()  # with their contents
        todo = deque[tuple[Any, int]]((module, 0) for module in model.modules())
        while todo:
            x, depth = todo.popleft()
            if id(x) not in self._seen and not isinstance(x, _WITHOUT_STATE):
                self._seen[id(x)] = x
                todo.extend(self._inside(x, depth))
        self.tensors = [x for x in self._seen.values() if isinstance(x, Tensor)]
        self._own = {id(x) for x in (*model.parameters(), *model.buffers())}

    def _inside(self, x: Any, depth: int) -> Iterator[tuple[Any, int]]:
        """What `x` holds, each with the number of objects around it."""
        if isinstance(x, Planned):  # its own attributes are not the model's
            yield vars(x)["model"], depth
        elif isinstance(x, nn.Module):
            self._containers.append(_Container(vars(x), _held(vars(x)), True))
            yield from ((y, depth) for y in vars(x).values())
        elif isinstance(x, (*_CONTAINERS, tuple, frozenset)):
            held = _held(x)
            if isinstance(x, _CONTAINERS):
                self._containers.append(_Container(x, held, False))
            yield from ((z, depth) for y in held for z in (y if isinstance(x, dict) else (y,)))
        elif isinstance(x, np.ndarray):
            self._arrays.append((x, x.copy()))
        elif depth < DEEPEST and not isinstance(x, Tensor):
            if isinstance(getattr(x, "__dict__", None), dict):
                yield vars(x), depth + 1
            if slots := _slots(x):
                in_slots = _Container(_Slots(x, slots), list(_Slots(x, slots)), False)
                self._containers.append(in_slots)
                yield from ((y, depth + 1) for _, y in in_slots.held)

    def put_back(self, but_set_up: bool = False) -> None:
        """Let containers hold what they held; they stay the same objects.

        Args:
            but_set_up: keep hooks, and flags of modules, as they are now.
        """
        hooks = {id(x) for each in self._containers if each.is_of_module for name, x in each.held if "_hooks" in name}
        for each in self._containers:
            if not but_set_up or id(each.container) not in hooks:
                each.put_back(but_set_up)
        for array, contents in self._arrays:
            if array.dtype.hasobject or array.tobytes() != contents.tobytes():  # bytes, because NaN is not NaN
                array[...] = contents

    def replace(self, replacement: Callable[[Tensor], Tensor]) -> None:
        """Let tensors be their replacements until they are put back; tied ones stay tied."""
        made = dict[int, Tensor]()

        def replaced(x: Any) -> Any:
            if type(x) is tuple:
                return tuple(map(replaced, x))
            if not isinstance(x, Tensor) or (id(x) not in self._own and not _is_ordinary(x)):
                return x
            if id(x) not in made:
                made[id(x)] = replacement(x)
            return made[id(x)]

        for each in self._containers:
            if any(isinstance(x, (Tensor, tuple)) for x in each.held):
                _fill(each.container, list(map(replaced, each.held)))


@contextmanager
def attributes_kept(model: nn.Module, *, sets_up: bool = False) -> Iterator[State]:
    """Let the attributes of all submodules be afterwards what they were: containers, and plain objects in them, too.

    Args:
        sets_up: keep hooks and flags that the model sets in its first call, unless that fails.
    """
    state, succeeds = State(model), False
    try:
        yield state
        succeeds = sets_up
    finally:
        state.put_back(but_set_up=succeeds)


@contextmanager
def replaced_tensors(
    model: nn.Module, replacement: Callable[[Tensor], Tensor], *, sets_up: bool = False
) -> Iterator[None]:
    """As `attributes_kept`, with a replacement for each parameter, buffer and tensor in an attribute meanwhile.

    (`torch.func.functional_call` does not put back the buffers of a module that occurs twice.)
    """
    with attributes_kept(model, sets_up=sets_up) as state:
        state.replace(replacement)
        yield


@contextmanager
def contents_kept(model: nn.Module) -> Iterator[None]:
    """As `attributes_kept`, for runs on real tensors: also the contents of all tensors but parameters."""
    with attributes_kept(model) as state:
        tensors = [x for x in state.tensors if not isinstance(x, nn.Parameter)]
        before = [(x, version_of(x), x.detach().clone()) for x in tensors]
        try:
            yield
        finally:
            with torch.no_grad():
                for x, version, old in before:
                    if version_of(x) != version or not torch.equal(x, old):  # batch norm's kernel notes no new version
                        x.copy_(old)


def read_in_attributes(model: nn.Module, read: Iterable[Any]) -> int:
    """Bytes of the tensors in attributes, except parameters and buffers, that are among those that a step reads."""
    own = {storage_key(x) for x in (*model.parameters(), *model.buffers())}
    held = {storage_key(x): storage_bytes(x) for x in State(model).tensors}
    keys = {storage_key(x) for x in read if isinstance(x, Tensor)} & held.keys()
    return sum(held[key] for key in keys - own)


def _is_ordinary(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided


def _base(container: Any) -> Any:
    """The built-in class of a container; the methods of the user's class may do more."""
    kinds, own = (OrderedDict, *_CONTAINERS, tuple, frozenset), type(container)
    return own if own in kinds else next(kind for kind in kinds if isinstance(container, kind))


def _held(container: Any) -> list[Any]:
    """The items of a container; of a dict with their keys."""
    if isinstance(container, _Slots):
        return list(container)
    base = _base(container)
    return list(base.items(container) if issubclass(base, dict) else container)


def _is_same(x: Any, y: Any) -> bool:
    is_pair = type(x) is tuple and type(y) is tuple and len(x) == len(y) == 2
    return x is y or (is_pair and x[0] is y[0] and x[1] is y[1])


def _fill(container: Any, held: list[Any]) -> None:
    """Let a container hold these items only."""
    if isinstance(container, _Slots):
        container.fill(held)
        return
    base = _base(container)
    base.clear(container)
    if issubclass(base, dict):
        for key, x in held:
            base.__setitem__(container, key, x)
    else:
        (base.update if base is set else base.extend)(container, held)
