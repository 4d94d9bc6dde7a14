"""From a plan to two `fx` graphs, forward and backward, that execute it.

Generated code drops every tensor after its last use, so that a graph only has to give the order of calls. A view is
made again from its storage if it is read after the storage was recomputed or passed from forward to backward.
"""

from __future__ import annotations

import collections
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from remat.errors import InvalidPlan
from remat.plan import DROP, FREE, OFFLOAD, PREFETCH
from remat.torch import _random
from remat.torch.copying import copies
from remat.torch.copying.copies import Copying
from remat.torch.copying.places import Move
from remat.torch.internals import notes
from remat.torch.internals.autograd import storage_key
from remat.torch.step import aot
from remat.torch.step.runners import is_random
from remat.torch.step.training_graph import END_KIND, CapturedStep
from remat.torch.step.with_implementations import Kept, Recipe, arguments_in


@aot.no_collection()
def emit(
    step: CapturedStep, order: Sequence[int], implementations: Sequence[str] = (), groups: Sequence[int] = (),
    update_of: Callable[[Tensor], Callable[[Tensor], None]] | None = None, copying: Copying | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:  # fmt: skip
    """Forward and backward of a valid order of computations of ``step.graph``, repeats included.

    Args:
        implementations: [C] name of the implementation of each computation, '' for the default; () for defaults only.
        groups: numbers of consecutive computations that a compiler may fuse, and must run in this order; () leaves it
            free.
        update_of: (parameter) -> the function that updates it with its gradient, for a step with updates.
        copying: for a plan with copies.

    Returns:
        The forward half takes the primals; it returns the training graph's forward outputs, then the saved tensors.
        The backward half takes the saved tensors, then the gradients of outputs; it returns a gradient or None for each
        primal.

    Raises:
        InvalidPlan: the order reads a tensor before it is computed, or a parameter after its update.
    """
    return _Emitter(step, order, implementations, groups, update_of, copying).emit()


SAVED = "saved_"  # begins the names of the placeholders of saved tensors


@dataclass(slots=True)
class _Half:
    """One of the two graphs while it is written.

    Attributes:
        made: node of the training graph, `_State`, `_Ticket` or `Kept` -> node here that holds it.
        views: view in the training graph -> (node here of its base, node here of the view).
        names: of the calls here.
        offloads: value -> the call here that copies it to the host.
    """

    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[Held, fx.Node] = field(default_factory=dict)
    views: dict[fx.Node, tuple[fx.Node, fx.Node]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    offloads: dict[int, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _State:
    """The state of the random generator before the first run of a call."""

    node: fx.Node

    @property
    def name(self) -> str:
        return f"{self.node.name}_state"


@dataclass(frozen=True, slots=True)
class _Ticket:
    """Of the step's copies."""

    name: str = "copies"


Held = fx.Node | _State | _Ticket | Kept


class _Emitter:
    def __init__(
        self, step: CapturedStep, order: Sequence[int], implementations: Sequence[str], groups: Sequence[int],
        update_of: Callable[[Tensor], Callable[[Tensor], None]] | None, copying: Copying | None,
    ):  # fmt: skip
        self.step, self.order = step, [int(k) for k in order]
        self.implementations = list(implementations) or [""] * len(self.order)
        self.group_of = [i for i, size in enumerate(groups) for _ in range(size)]
        self.group: int | None = None  # of the computation that is written
        self.training_graph, self.runner = step.training_graph, step.training_graph.runner
        self.forward, self.backward = _Half(), _Half()
        self.half = self.forward
        self.saved: dict[Held, fx.Node] = {}  # -> its placeholder in the backward half
        self.given: dict[fx.Node, fx.Node] = {}  # gradient of an output -> its placeholder in the backward half
        self.calls = {node for nodes in step.nodes for node in nodes}
        self.times = collections.Counter(self.order)
        self.done: set[int] = set()
        self.update_of = update_of
        self.updated: dict[int, fx.Node] = {}  # primal -> call that updates it
        self.changed: set[int] = set()  # storages of parameters that are updated already
        self.copying = copying
        self.moves = copying.places.moves if copying is not None else ((),) * (len(self.order) + 1)
        self.tensors_of = self._tensors_of_values() if copying is not None else {}
        self.coming: set[int] = set()  # values that were fetched, and that nobody has waited for
        self.copied: set[int] = set()  # values that were copied to the host
        self.hosted: set[int] = set()  # those of them that are there
        self.gone: set[fx.Node] = set()  # nodes whose values were freed in the backward half
        places, primals = self.training_graph.places, self.training_graph.primals
        self.storage_of = {n: storage_key(primals[i]) for i, n in places.items() if isinstance(primals[i], Tensor)}

    def emit(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        training_graph = self.training_graph
        n_forward = training_graph.n_forward_outputs
        for node in training_graph.module.graph.find_nodes(op="placeholder"):
            if node not in training_graph.tangents:
                self._place(self.forward, node, node.name, node.meta)
        self._begin_copies()
        outputs: list[fx.Node | None] = []
        for i, (k, name) in enumerate(zip(self.order, self.implementations, strict=True)):
            self.group = self.group_of[i] if self.group_of else None
            self._move(self.moves[i])
            self._arrive(self.step.graph.operations[k].inputs)
            self._replace(self.step.graph.operations[k].outputs)
            if self.step.graph.operations[k].kind == END_KIND:
                for node in self.step.nodes[k]:
                    self._call(node)
                outputs = [None if n is None else self._fetch(n) for n in training_graph.outputs[:n_forward]]
                self._change_halves()
            elif k in self.step.updates:
                self._update(k)
            elif name and not (k in self.done and self.step.recipes[k, name].checks):
                self._compute_as(k, self.step.recipes[k, name])
            else:
                self._compute(k)
            self.done.add(k)
        self._move(self.moves[-1])
        self._arrive([*self.coming])
        # An update gives None in place of the gradient. If the half returned None itself, AOT autograd would take the
        # parameter for one that needs no gradient.
        gradients = [
            self.updated[i] if i in self.updated else None if n is None else self._gradient(n)
            for i, n in enumerate(training_graph.outputs[n_forward:])
        ]
        descriptions = notes.descriptions_of_outputs(training_graph.module.graph)
        tangents = [self.given.get(node) or self._hold(node) for node in training_graph.tangents]
        _put_first(self.backward.graph, [*self.saved.values(), *tangents])
        outputs += [self.forward.made[x] for x in self.saved]
        aot.finish(self.forward.graph, outputs, descriptions[:n_forward])
        aot.finish(self.backward.graph, gradients, descriptions[n_forward:])
        forward, backward = (
            fx.GraphModule(training_graph.module, half.graph) for half in (self.forward, self.backward)
        )
        backward.meta[aot.TANGENTS] = self._output_of_tangents()
        return forward, backward

    def _output_of_tangents(self) -> dict[str, int]:
        """Name of the placeholder of an output's gradient in the backward half -> index of that forward output.

        A gradient of something else, of which nobody says whether it is missing, has -1.
        """
        outputs = notes.descriptions_of_outputs(self.training_graph.module.graph)
        described = {node: notes.differentiated_output(node) for node in self.training_graph.tangents}
        return {
            self.given[node].name: outputs.index(output) if output in outputs else -1
            for node, output in described.items()
        }

    def _tensors_of_values(self) -> dict[int, tuple[fx.Node, ...]]:
        """[value] nodes of the training graph that hold its storage, views left out.

        What a repetition does not make again is left out too (the running statistics of batch norm): it stays.
        """
        found, tangents = dict[int, list[fx.Node]](), set(self.training_graph.tangents)
        for node, v in self.step.storage.items():
            call: Any = node.args[0] if node.target is operator.getitem else node
            if not isinstance(v, int) or (call not in self.calls and node not in tangents):
                continue
            n_parts = aot.repetition(call)[3] if call is not node else None
            is_again = self.times[self.step.graph.producer[v]] > 1
            if n_parts is None or not is_again or int(str(node.args[1])) < n_parts:
                found.setdefault(v, []).append(node)
        return {v: tuple(nodes) for v, nodes in found.items()}

    def _begin_copies(self) -> None:
        if self.copying is not None:
            vals = (node.meta["val"] for node in self.training_graph.places.values())
            like = next(val for val in vals if isinstance(val, Tensor))
            self.forward.made[_Ticket()] = self._add(self.copying.begin, (), {}, aot.fake_ticket(like))

    def _change_halves(self) -> None:
        """Go on with the backward half; what was on the host is there."""
        self.half = self.backward
        if self.copying is not None:
            ticket = self._hold(_Ticket())
            self.backward.made[_Ticket()] = self._add(copies.begin_backward, (ticket,), {}, ticket.meta["val"])

    def _move(self, moves: Sequence[Move]) -> None:
        """Write a plan's copies, and waits where it frees what is copied; tensors are dropped after their last use."""
        for kind, v, copy in moves:
            nodes = self.tensors_of.get(v, ())
            if kind == FREE:
                self._free(v)
            elif kind == OFFLOAD and self._are_there(nodes):
                self.half.offloads[v] = self._copy(copies.offload, v, copy, *map(self._hold, nodes))
                self.copied.add(v)
                self.hosted.add(v)
            elif kind == PREFETCH and v in self.hosted:
                self._prefetch(v)
            elif kind == DROP and v in self.hosted:
                self._copy(copies.drop, v, *self._offloaded(v))
                self.hosted.discard(v)

    def _prefetch(self, v: int) -> None:
        nodes = self.tensors_of[v]
        self._land(nodes, self._copy(copies.prefetch, v, len(nodes), *self._offloaded(v)))
        self.coming.add(v)

    def _offloaded(self, v: int) -> list[fx.Node]:
        """The call of this half that copies a value to the host, if there is one."""
        return [self.half.offloads[v]] if v in self.half.offloads else []

    def _are_there(self, nodes: Sequence[fx.Node]) -> bool:
        """Whether something holds a value."""

        def is_there(node: fx.Node) -> bool:
            passed_on = node in self.forward.made or notes.is_tangent(node)
            return node in self.half.made or (passed_on and node not in self.gone)

        return bool(nodes) and all(map(is_there, nodes))

    def _copy(self, function: Callable[..., Any], *args: Any) -> fx.Node:
        return self._add(function, (self._hold(_Ticket()), *args), {}, None)

    def _land(self, nodes: Sequence[fx.Node], made: fx.Node) -> None:
        """Let what a prefetch makes be the tensors of a value."""
        made.meta["val"] = vals = [node.meta["val"] for node in nodes]
        if len(nodes) == 1:
            (made.meta["val"],) = vals
            self.half.made[nodes[0]] = made
            return
        for i, node in enumerate(nodes):
            self.half.made[node] = self._add(operator.getitem, (made, i), {}, vals[i])

    def _free(self, v: int) -> None:
        self._settle(v)
        nodes = self.tensors_of.get(v, ())
        for node in nodes:
            self.half.made.pop(node, None)
        if self.half is self.backward:
            self.gone.update(nodes)

    def _arrive(self, values: Sequence[int]) -> None:
        """Wait for values that are read next."""
        for v in values:
            if v in self.coming:
                self.coming.discard(v)
                self._copy(copies.arrive, v, *map(self._hold, self.tensors_of[v]))

    def _replace(self, values: Sequence[int]) -> None:
        """Wait for copies of values that are made next, in place of tensors that are there."""
        for v in values:
            self._settle(v)

    def _settle(self, v: int) -> None:
        """Wait for the copies of a value whose tensors go next, if they are there."""
        nodes = self.tensors_of.get(v, ())
        if v in self.copied and self._are_there(nodes):
            self._copy(copies.free, v, *map(self._hold, nodes))
        self.coming.discard(v)

    def _update(self, k: int) -> None:
        if self.half is self.forward or self.update_of is None:
            raise InvalidPlan(f"'{self.step.graph.operations[k].name}' is no operation of the forward pass")
        update = self.step.updates[k]
        function = self.update_of(self.training_graph.primals[update.primal])
        self.updated[update.primal] = self._add(function, (self._fetch(update.gradient),), {}, None)
        self.changed.add(storage_key(self.training_graph.primals[update.primal]))

    def _compute(self, k: int) -> None:
        (node,) = self.step.nodes[k]
        if k not in self.done:
            self._keep_state_to_repeat(k, node)
            self._call(node)
        elif self.runner.is_replayed(node):
            args, kwargs = self._arguments(node.args, node.kwargs)
            args = (self._hold(_State(node)), node.target, *args)
            self._holds(node, self._add(_random.with_random_state, args, kwargs, node.meta["val"]))
        else:
            target, args, kwargs, n_parts = aot.repetition(node)
            self._holds(node, self._add(target, *self._arguments(args, kwargs), node.meta["val"], node.name), n_parts)

    def _keep_state_to_repeat(self, k: int, node: fx.Node) -> None:
        if self.times[k] > 1 and self.runner.is_replayed(node):
            state = self._add(_random.state_to_repeat, (aot.device_of(node),), {}, aot.fake_state(node))
            self.half.made[_State(node)] = state

    def _compute_as(self, k: int, recipe: Recipe) -> None:
        """Call another implementation, and take the call's results and the kept tensors out of its result."""
        (node,) = self.step.nodes[k]
        args = list(arguments_in(recipe.args, self._fetch, self._hold))
        if recipe.overwrites is not None and args[recipe.overwrites] in self.saved.values():
            # Backward may run twice, so it must not change a saved tensor.
            x = args[recipe.overwrites]
            args[recipe.overwrites] = self._add(torch.clone, (x,), {}, x.meta["val"])
        target = recipe.target
        if k not in self.done:
            self._keep_state_to_repeat(k, node)
        elif is_random(node):
            target, args = _random.drawing_again(recipe.target), [self._hold(_State(node)), *args]
        made = self._add(target, tuple(args), {}, recipe.vals)
        if recipe.results is None:
            self._holds(node, made)
            return
        parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        has_parts = isinstance(node.meta["val"], (tuple, list))
        targets = [parts.get(i) if has_parts else node for i in recipe.results]
        for at, held in enumerate([*targets, *recipe.kept]):
            if held is None:
                continue
            if isinstance(recipe.vals, (tuple, list)):
                self.half.made[held] = self._add(operator.getitem, (made, at), {}, recipe.vals[at])
            else:
                self.half.made[held] = made

    def _call(self, node: fx.Node) -> None:
        self._holds(node, self._add(node.target, *self._arguments(node.args, node.kwargs), node.meta["val"], node.name))

    def _add(self, target: Any, args: Any, kwargs: Any, val: Any, name: str | None = None) -> fx.Node:
        """Write a call; `name` is that in the training graph."""
        name = self.runner.name_of(name, self.half.names, self.group)
        made = self.half.graph.create_node("call_function", target, args, kwargs, name)
        self.half.names.add(made.name)
        made.meta["val"] = val
        return made

    def _holds(self, node: fx.Node, made: fx.Node, n_parts: int | None = None) -> None:
        """Let `made` be the result of the training graph's `node`, and take out its (first `n_parts`) parts at once."""
        self.half.made[node] = made
        for part in node.users:
            if part.target is operator.getitem and (n_parts is None or int(str(part.args[1])) < n_parts):
                self.half.made[part] = self._add(
                    operator.getitem, (made, part.args[1]), {}, part.meta["val"], part.name
                )

    def _arguments(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return fx.map_arg(args, self._read), fx.map_arg(kwargs, self._read)

    def _read(self, node: fx.Node) -> fx.Node:
        return self._fetch(self._viewed(node))

    def _viewed(self, node: fx.Node) -> fx.Node:
        """A node without views that change nothing: no half is differentiated, so that they are not needed.

        What works in place counts as a view elsewhere, but not here.
        """
        same, viewed = node, node
        while self._is_view(viewed) and getattr(viewed.target, "is_view", False):
            viewed = viewed.all_input_nodes[0]
            same = viewed if _layout(viewed) == _layout(node) else same
        return same

    def _gradient(self, node: fx.Node) -> fx.Node:
        """A gradient that the backward half returns; what it did not make itself stays a view, as autograd expects."""
        same = self._viewed(node)
        return self._fetch(same if same.op == "call_function" else node)

    def _is_view(self, node: fx.Node) -> bool:
        part_of_call = node.target is operator.getitem and node.args[0] in self.calls
        return node.op == "call_function" and node not in self.calls and not part_of_call

    def _fetch(self, node: fx.Node) -> fx.Node:
        """The node of the current half that stands for `node` of the training graph; views are made again if needed."""
        if not self._is_view(node):
            return self._hold(node)
        source = self._read(node.all_input_nodes[0])
        known = self.half.views.get(node)
        if known is None or known[0] is not source:
            made = self._add(node.target, *self._arguments(node.args, node.kwargs), node.meta["val"], node.name)
            known = self.half.views[node] = source, made
        return known[1]

    def _hold(self, held: Held) -> fx.Node:
        """The node here of a storage, a constant or a random state; forward saves it if backward lacks it."""
        half = self.half
        if self.storage_of.get(held) in self.changed:  # pyright: ignore[reportArgumentType] - others have none
            raise InvalidPlan(f"'{held}' is read after its update")
        if held in half.made:
            return half.made[held]
        if isinstance(held, fx.Node) and held.op == "get_attr":
            half.made[held] = half.graph.get_attr(str(held.target))
            half.made[held].meta.update(held.meta)
            return half.made[held]
        if isinstance(held, fx.Node) and held in self.training_graph.tangents:
            if half is self.forward:
                raise InvalidPlan(f"the forward pass reads '{held}', a gradient of an output")
            self.given[held] = self._place(half, held, held.name, held.meta)
            return self.given[held]
        if half is self.forward or held not in self.forward.made:
            raise InvalidPlan(f"'{held}' is read before it is computed")
        # The name must be new: `fx` generates wrong code for a placeholder of a name that exists.
        name = SAVED + re.sub(r"\W", "_", held.name)
        self.saved[held] = self._place(half, held, name, self.forward.made[held].meta)
        return self.saved[held]

    def _place(self, half: _Half, held: Held, name: str, meta: dict[str, Any]) -> fx.Node:
        half.made[held] = half.graph.placeholder(name)
        half.made[held].meta.update({key: meta[key] for key in notes.COPIED_META if key in meta})
        return half.made[held]


def _layout(node: fx.Node) -> Any:
    """Where in its storage a tensor is; of what is no tensor, something that nothing else is equal to."""
    x = node.meta.get("val")
    if not isinstance(x, Tensor):
        return node
    return x.dtype, *x.shape, *x.stride(), x.storage_offset(), x.is_conj(), x.is_neg()


def _put_first(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    for node in reversed(nodes):
        first = next(iter(graph.nodes))
        if first is not node:
            first.prepend(node)
