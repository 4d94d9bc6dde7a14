"""Other implementations of the calls of a captured step: a graph to choose from, and how each choice is executed.

`remat.torch.implementations` lists them. This module finds the forward and backward calls of a step that each of them
replaces, and writes down as values what it reads and makes. Only one implementation replaces a chain of forward calls:
batch norm with a leaky ReLU written over it. Its parts are implementations of single calls.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from remat.graph import Value, Work
from remat.implementation import Implementation
from remat.torch.implementations import (
    IMPLEMENTATIONS,
    Calls,
    Family,
    TorchImplementation,
    all_arguments,
    batch_norm_backward_from_leaky_relu,
)
from remat.torch.internals.operators import FakeTensor, tree_iter, tree_map
from remat.torch.step.training_graph import END_KIND, CapturedStep, values_in
from remat.torch.step.work import plain_form, storage_bytes, tensor_bytes, tensors_of

CHOICES = ("default", "exact", "joint")


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that only an implementation makes: the `index`-th that it keeps from a call for the backward call."""

    call: fx.Node
    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an operation is computed by one of its implementations.

    Attributes:
        target: function to call with `args`: nodes of the captured graph, `_Part`, `Kept`, and plain values.
        args: of `target`, by position.
        vals: the function's results without contents; one tensor if it returns no tuple.
        results: for each leading result of a forward function, the index of the equal result of the call; None if the
            function returns the same as the call.
        kept: the results that follow these.
        overwrites: argument that is written over, or None.
        checks: the function only checks its arguments, so that a repetition runs the call itself.
    """

    target: Any
    args: tuple[Any, ...]
    vals: Any
    results: tuple[int, ...] | None = None
    kept: tuple[Kept, ...] = ()
    overwrites: int | None = None
    checks: bool = False


def with_implementations(step: CapturedStep, implementations: str) -> CapturedStep:
    """The step with every implementation that applies; for ``exact``, with those that give the default's bits."""
    return step if implementations == "default" else _Finder(step, implementations == "exact").find()


class _Finder:
    def __init__(self, step: CapturedStep, exact: bool):
        self.step, self.exact = step, exact
        self.place = {node: k for k, nodes in enumerate(step.nodes) if len(nodes) == 1 for node in nodes}
        self.values = list(step.graph.values)
        self.implementations: dict[int, list[Implementation]] = {}
        self.recipes: dict[tuple[int, str], Recipe] = {}
        self.extra: dict[Kept, int] = {}
        self.kept_vals: dict[Kept, torch.Tensor] = {}
        self.primals = {place: step.training_graph.primals[i] for i, place in step.training_graph.places.items()}

    def find(self) -> CapturedStep:
        for implementation in IMPLEMENTATIONS.values():
            left_out = implementation.is_default or len(implementation.forward_kinds) > 1
            if left_out or (self.exact and not implementation.exact):
                continue
            for node, k in self.place.items():
                if (self.step.graph.operations[k].kind,) == implementation.forward_kinds:
                    self._attach(implementation, node)
        if not self.exact:
            self._attach_activated()
        graph = self.step.graph
        operations = tuple(
            replace(op, implementations=tuple(self.implementations.get(k, ()))) for k, op in enumerate(graph.operations)
        )
        graph = replace(graph, operations=operations, values=tuple(self.values))
        return replace(self.step, graph=graph, recipes=self.recipes)

    def _attach(self, made: TorchImplementation, node: fx.Node) -> None:
        val = node.meta["val"]
        devices = {t.device.type for t in tensors_of(val)}
        if not devices <= set(made.devices):
            return
        has_parts = not isinstance(val, torch.Tensor)
        results = tuple(_Part(node, i) if has_parts else node for _, i in made.results)
        kept = tuple(Kept(node, i, f"{node.name}.{name}") for i, name in enumerate(made.kept))
        backward = self._backward_of(made, node) if made.backward_kinds else None
        if made.backward_kinds and backward is None:
            return
        backward_calls = () if backward is None else (_arguments(backward),)
        calls = Calls((_arguments(node),), backward_calls, results, kept)
        if made.why_not(self._known(calls)):
            return
        vals = self._forward_vals(made, calls, val) if made.forward is not None else ()
        args = made.backward_arguments(calls) if made.backward_arguments is not None else ()
        if vals is None or any(isinstance(x, _Part) and _getitem(x) is None for x in tree_iter(args)):
            return
        # A value of no bytes ties the backward function to the check in the forward function that allows it.
        checks = made.forward is not None and made.backward is not None and made.family is Family.OUTPUT
        if made.forward is not None:
            self._add_forward(made, node, calls, vals, checks)
        if made.backward is not None and backward is not None:
            checked = [self._token(node, made.name)] if checks else []
            self._add_backward(backward, made.name, made.backward, args, checked)

    def _attach_activated(self) -> None:
        """Attach batch norm's backward from the output of the leaky ReLU that follows (`batch_norm_leaky_relu`)."""
        fused, alone = IMPLEMENTATIONS["batch_norm_leaky_relu"], IMPLEMENTATIONS["batch_norm_from_output"]
        for node, k in self.place.items():
            if self.step.graph.operations[k].kind != fused.forward_kinds[-1] or not isinstance(node.args[0], fx.Node):
                continue
            norm = node.args[0].args[0] if node.args[0].target is operator.getitem else None
            at = self.place.get(norm) if isinstance(norm, fx.Node) else None
            if not isinstance(norm, fx.Node) or at is None or (at, alone.name) not in self.recipes:
                continue
            backward = self._backward_of(alone, norm)
            assert backward is not None  # `alone` was attached to it
            own, activation, differentiated = map(_arguments, (norm, node, backward))
            if fused.why_not(self._known(Calls((own, activation), (differentiated,)))):
                continue
            args = (backward.args[0], node, *own[1:3], _Part(norm, 2), activation[1], differentiated[-1])
            self._add_backward(backward, "batch_norm_from_leaky_relu", batch_norm_backward_from_leaky_relu, args,
                               [self._token(norm, alone.name)])  # fmt: skip

    def _add_backward(self, call: fx.Node, name: str, target: Any, args: tuple[Any, ...], checked: list[int]) -> None:
        outputs = self.step.graph.operations[self.place[call]].outputs
        self._add(call, name, Recipe(target, args, call.meta["val"]), checked, outputs)

    def _add_forward(self, made: TorchImplementation, node: fx.Node, calls: Calls, vals: Any, checks: bool) -> None:
        storage, args = self.step.storage[node], made.forward_arguments(calls)
        indices = tuple(i for _, i in made.results)
        own = set(values_in(storage))
        outputs = [v for v in ([storage] if isinstance(storage, int) else [storage[i] for i in indices])
                   if isinstance(v, int)]  # fmt: skip
        operation = self.step.graph.operations[self.place[node]]
        outputs += [v for v in operation.outputs if v not in own]  # the token that keeps its place in the order
        for kept, val in zip(calls.kept, vals[len(indices) :] if calls.kept else (), strict=True):
            self.kept_vals[kept] = val
            outputs.append(self._extra(kept, storage_bytes(val)))
        if checks:
            outputs.append(self._token(node, made.name))
        overwrites = None
        if made.overwrites is not None:
            overwrites = self.step.storage[args[made.overwrites]]
            x = args[made.overwrites].meta["val"]
            first = tensors_of(node.meta["val"])[0]
            same = isinstance(overwrites, int) and self.values[overwrites].bytes == self.values[outputs[0]].bytes
            # The caller, or another backward pass over the same forward pass, may still read these.
            source = self.step.graph.operations[self.step.graph.producer[overwrites]] if same else operation
            foreign = source.kind == END_KIND or source.is_backward != operation.is_backward
            if not same or foreign or x.stride() != first.stride() or x.dtype != first.dtype:
                return
        recipe = Recipe(made.forward, args, vals, indices, calls.kept, made.overwrites, checks)
        self._add(node, made.name, recipe, [], tuple(dict.fromkeys(outputs)), overwrites)

    def _add(
        self, node: fx.Node, name: str, recipe: Recipe, checked: list[int], outputs: tuple[int, ...],
        overwrites: int | None = None,
    ) -> None:  # fmt: skip
        k = self.place[node]
        operation = self.step.graph.operations[k]
        if (k, name) in self.recipes:
            return
        known = {v for x in node.all_input_nodes for v in values_in(self.step.storage[x])}
        ordered = set(operation.inputs) - known  # the token that keeps its place in the order
        reads = ordered.union(self._values(recipe.args), checked)
        side = "backward" if recipe.results is None else "forward"
        flops = operation.work.flops if operation.work else None  # the same arithmetic as by default, or less
        work = _work(f"{name}.{side}", recipe.args, recipe.vals, self._val, flops)
        implementation = Implementation(name, tuple(sorted(reads)), outputs, overwrites=overwrites, work=work)
        self.implementations.setdefault(k, []).append(implementation)
        self.recipes[k, name] = recipe

    def _backward_of(self, made: TorchImplementation, node: fx.Node) -> fx.Node | None:
        """The backward call of a forward call: it reads the call's results, or else its input and weight."""
        results = [self._identity(x) for x in (node, *node.users) if x is node or x.target is operator.getitem]
        candidates = [
            other for other, k in self.place.items()
            if self.step.graph.operations[k].is_backward
            and self.step.graph.operations[k].kind == made.backward_kinds[0]
        ]  # fmt: skip
        inputs = [self._identity(x) for x in node.args[:2] if isinstance(x, fx.Node)]
        for wanted in (results, inputs, inputs[:1]):
            found = []
            for other in candidates:
                read = {self._identity(x) for x in other.args[1:] if isinstance(x, fx.Node)}
                if (any if wanted is results else all)(x in read for x in wanted):
                    found.append(other)
            if found:
                return found[0] if len(found) == 1 else None
        return None

    def _identity(self, node: fx.Node) -> Any:
        """An identity shared by a tensor and its aliases; backward calls may read an alias in its place."""
        value = self.step.storage[node]
        return (value, tuple(node.meta["val"].shape)) if isinstance(value, int) else node

    def _known(self, calls: Calls) -> Calls:
        """The calls with real parameters where known: only the contents tell whether a weight may be a divisor."""

        def known(x: Any) -> Any:
            primal = self.primals.get(x) if isinstance(x, fx.Node) else None
            return x if primal is None or isinstance(primal, FakeTensor) else primal

        forward, backward = tree_map(known, calls.forward), tree_map(known, calls.backward)
        return Calls(forward, backward, calls.results, calls.kept)

    def _forward_vals(self, made: TorchImplementation, calls: Calls, val: Any) -> Any:
        """Fake tensors for the results of the forward function; None if it cannot run on fake tensors.

        Args:
            val: the fake tensors that the replaced call makes.
        """
        args = tree_map(self._val, made.forward_arguments(calls), is_leaf=lambda x: isinstance(x, (fx.Node, _Part)))
        if made.overwrites is not None:
            return calls.forward[0][0].meta["val"] if len(made.results) == 1 else None
        if made.family is Family.ALGORITHM:  # the same as the call; some would loop over the samples here
            return val
        mode = next((t.fake_mode for t in tensors_of(args) if isinstance(t, FakeTensor)), None)
        if mode is None:
            return None
        assert made.forward is not None
        with mode, torch.no_grad():
            return made.forward(*args)

    def _val(self, x: Any) -> Any:
        if isinstance(x, _Part):
            return x.node.meta["val"][x.index]
        if isinstance(x, Kept):
            return self.kept_vals[x]
        return x.meta["val"] if isinstance(x, fx.Node) else x

    def _values(self, args: Any) -> Iterator[int]:
        for x in tree_iter(args):
            if isinstance(x, Kept):
                yield self.extra[x]
            elif isinstance(x, _Part):
                yield from values_in(self.step.storage[x.node][x.index])
            elif isinstance(x, fx.Node):
                yield from values_in(self.step.storage[x])

    def _extra(self, kept: Kept, size: int) -> int:
        if kept not in self.extra:
            self.extra[kept] = len(self.values)
            self.values.append(Value(kept.name, size))
        return self.extra[kept]

    def _token(self, node: fx.Node, name: str) -> int:
        return self._extra(Kept(node, -1, f"{node.name}.{name} checked"), 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """One result of a call that has several."""

    node: fx.Node
    index: int


def _arguments(call: fx.Node) -> tuple[Any, ...]:
    return all_arguments(call.target, call.args, call.kwargs)


def _work(function: str, args: tuple[Any, ...], vals: Any, val: Callable[[Any], Any], flops: int | None) -> Work:
    """The work of a function: the bytes that it moves, and a signature from which its call can be measured."""
    concrete = tree_map(val, args, is_leaf=lambda x: isinstance(x, (fx.Node, _Part, Kept)))
    read, made = tensors_of(concrete), tensors_of(vals)
    floats = [t.dtype for t in (*made, *read) if t.dtype.is_floating_point]
    plain = {"fw": "torch", "op": f"implementation.{function}", "args": plain_form(list(concrete)), "kwargs": {}}
    return Work(
        flops=flops,
        bytes_moved=sum(map(tensor_bytes, read)) + sum(map(tensor_bytes, made)),
        dtype=str((floats or [torch.float32])[0]).removeprefix("torch."),
        signature=json.dumps(plain, sort_keys=True, separators=(",", ":")),
    )


def arguments_in(
    args: tuple[Any, ...], fetch: Callable[[fx.Node], fx.Node], hold: Callable[[Kept], fx.Node]
) -> tuple[Any, ...]:
    """Arguments of a recipe, with the nodes that hold them in the graph that is being written."""

    def of(x: Any) -> Any:
        if isinstance(x, Kept):
            return hold(x)
        node = _getitem(x) if isinstance(x, _Part) else x
        return fetch(node) if isinstance(node, fx.Node) else node

    return tree_map(of, args, is_leaf=lambda x: isinstance(x, (fx.Node, _Part, Kept)))


def _getitem(part: _Part) -> fx.Node | None:
    """The node of the captured graph that takes the part out of the call's results."""
    return next((x for x in part.node.users if x.target is operator.getitem and x.args[1] == part.index), None)
