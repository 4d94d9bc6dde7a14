"""Branches of a plan's graph that run their operations in order, and end before the next computation starts.

TensorFlow writes a branch into the graph around it. There its operations run side by side, and what waits for the
branch waits for its side effects only. Both would take more memory than the plan counts.
"""

from __future__ import annotations

from typing import Any

from remat.tf._nested import BRANCHES


def order_branches(graph_def: Any) -> None:
    """Give every ``If`` and ``Case`` functions whose operations wait for each other; changes `graph_def`."""
    known = {function.signature.name: function for function in graph_def.library.function}
    for node in graph_def.node:
        _order(node, graph_def.library, known)


def _order(node: Any, library: Any, known: dict[str, Any]) -> None:
    if node.op not in BRANCHES:
        return
    attrs = [node.attr[name] for name in ("then_branch", "else_branch", "branches") if name in node.attr]
    for function in [f for attr in attrs for f in (attr.list.func or [attr.func])]:
        name = f"{function.name}_in_order"  # the process may know the function by its own name already
        if name not in known:
            known[name] = _in_order(known[function.name], name, library, known)
        function.name = name


def _in_order(function: Any, name: str, library: Any, known: dict[str, Any]) -> Any:
    ordered = library.function.add()
    ordered.CopyFrom(function)
    ordered.signature.name = name
    previous = ""
    for node in _producers_first(ordered.node_def):
        _order(node, library, known)
        if node.op != "NoOp":  # only control edges lead to it
            if previous:
                node.input.append(f"^{previous}")
            previous = node.name
    if previous:
        ordered.signature.control_output.append("in_order")
        ordered.control_ret["in_order"] = previous
    return ordered


def _producers_first(nodes: Any) -> list[Any]:
    by_name = {node.name: node for node in nodes}
    ordered: dict[str, Any] = {}

    def visit(node: Any) -> None:
        for source in node.input:
            found = by_name.get(source.removeprefix("^").partition(":")[0])
            if found is not None and found.name not in ordered:
                visit(found)
        ordered[node.name] = node

    for node in nodes:
        if node.name not in ordered:
            visit(node)
    return list(ordered.values())
