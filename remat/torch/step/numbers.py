"""Numbers in a model's attributes that its steps change, e.g. a counter of calls: they stay out of the step's graph.

Dynamo takes the numbers that it meets for constants, so that a step with another value would be captured again. A
number that a step changes becomes an argument of the graph instead. What is computed from it is taken out of the graph
and runs in Python; what computes tensors from it is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from remat.errors import InvalidInput
from remat.torch.internals import dynamo, notes

_REMEDY = "keep it in a tensor (register_buffer), or change it outside of the module"


MOST_STATES = 32  # of a container, for which steps on equal arguments are compiled


class NumbersChange(Exception):
    """Ends a compilation, because the step changes numbers that were taken for constants.

    Attributes:
        names: as Dynamo has them.
    """

    def __init__(self, names: set[str]):
        super().__init__(*names)
        self.names = names


def numbers_apart(
    graph: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Sequence[Any], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """(the graph that Dynamo captured, without what it computes in numbers, its inputs, what adds the numbers to its
    compiled function).

    Raises:
        NumbersChange: numbers that were taken for constants change; capture the step again.
        InvalidInput: the step changes what a captured step cannot follow.
    """
    _check_changes()
    places = graph.graph.find_nodes(op="placeholder")
    apart = dict.fromkeys(node for node in places if isinstance(notes.example_of(node), torch.SymInt))
    for node in graph.graph.nodes:
        read = node.all_input_nodes
        if node.op == "call_function" and read and all(x in apart for x in read):
            apart[node] = None
        elif node.op != "output" and any(x in apart for x in read):
            name = dynamo.attribute_name(next(x for x in apart if x.op == "placeholder"))
            raise InvalidInput(f"'{name}' is a number that changes in each step, and tensors depend on it: {_REMEDY}")
    if not apart:
        return graph, inputs, lambda compiled: compiled
    (results,) = graph.graph.find_nodes(op="output")[0].args
    is_number = [isinstance(x, fx.Node) and x in apart for x in results]  # pyright: ignore[reportGeneralTypeIssues]
    takes_number = [node in apart for node in places]
    numbers = _part(graph, list(apart), results).forward
    rest = _part(graph, [node for node in graph.graph.nodes if node not in apart], results)

    def with_numbers(compiled: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any) -> list[Any]:
            given = iter(numbers(*(x for x, is_one in zip(args, takes_number, strict=True) if is_one)))
            made = iter(compiled(*(x for x, is_one in zip(args, takes_number, strict=True) if not is_one)))
            return [next(given if is_one else made) for is_one in is_number]

        return both

    kept = [x for x, is_one in zip(inputs, takes_number, strict=True) if not is_one]
    return rest, kept, with_numbers


def _part(graph: fx.GraphModule, nodes: list[fx.Node], results: Any) -> fx.GraphModule:
    """A copy of these nodes with those results that they make; Dynamo calls its own graph's arguments."""
    part, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        if node.op != "output":
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[x] for x in results if x in copies))
    made = fx.GraphModule(graph, part)
    made.meta.update(graph.meta)
    return made


def _check_changes() -> None:
    names = set[str]()
    for name, (before, after) in dynamo.changed_numbers().items():
        if type(before) is not int or type(after) is not int:
            raise InvalidInput(
                f"'{dynamo.shown_name(name)}' is a number that changes in each step ({before:.6g} to {after:.6g}), "
                f"and each value would be compiled anew: {_REMEDY}"
            )
        names.add(name)
    if names:
        raise NumbersChange(names)
    for name, container in dynamo.changed_containers().items():
        if isinstance(container, deque) and container.maxlen is not None:
            raise InvalidInput(
                f"'{dynamo.shown_name(name)}' is a deque with maxlen that the step changes, which PyTorch's compiler "
                "gets wrong: use a list, and drop its first item"
            )


def check_containers(states: dict[tuple[str, str], set[Any]], arguments: str) -> None:
    """Refuse a list, dict, set or deque that grows or counts, so that each step on equal arguments is compiled anew.

    Args:
        states: (name, arguments) -> what the container was like when a step was compiled; grows.
    """
    for name, container in dynamo.changed_containers().items():
        values = container.values() if isinstance(container, dict) else container
        like = len(container), tuple(x for x in values if isinstance(x, (int, float, str)))
        states.setdefault((name, arguments), set()).add(like)
        if len(states[name, arguments]) > MOST_STATES:
            raise InvalidInput(
                f"'{dynamo.shown_name(name)}' (of {len(container)} items) changes in each step, "
                "which is then compiled anew: clear it in the loop, or keep a tensor (register_buffer)"
            )
