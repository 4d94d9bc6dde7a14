"""The form of a bound's certificate, a file that anyone can read; `remat.bounds.certificate` checks the proof."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from remat.errors import InvalidInput
from remat.files import UnknownKeys, read_json, write_text
from remat.graph import text_problem
from remat.link import Link
from remat.plan import Scope, parse_scope

# Rows of the staged LP; of the window relaxation; of that with copies over a link.
FORMAT, WINDOW_FORMAT, LINK_FORMAT = "remat-bound/1", "remat-bound/2", "remat-bound/3"
# [format] how many numbers, at least, name a row of each kind
KINDS = {
    FORMAT: {"edge": 3, "continuity": 2, "memory": 1, "once": 2, "knapsack": 4},
    # run, later and slot in scope staged only, choice only where an operation has several implementations
    WINDOW_FORMAT: {
        "need": 3, "edge": 4, "continuity": 3, "join": 3, "each": 4, "memory": 1, "run": 3, "later": 3, "slot": 2,
        "choice": 1, "chosen": 4, "knapsack": 4,
    },
}  # fmt: skip
KINDS[LINK_FORMAT] = {
    **KINDS[WINDOW_FORMAT],
    "need_out": 3, "edge_out": 4, "continuity_out": 3, "out": 2, "source": 3, "one": 2, "arrived": 2, "stream_out": 1,
    "stream_in": 1, "arrival": 1, "deadline": 3, "held_out": 2, "begun_out": 2, "single_out": 1, "held_in": 2,
    "begun_in": 2, "single_in": 1, "release": 2, "arrival_run": 3, "host": 1, "stayed": 2, "sent": 2, "again": 2,
}  # fmt: skip
# [format] the columns that a tree may branch on
COLUMNS = {WINDOW_FORMAT: ("S", "R", "U", "X"), LINK_FORMAT: ("S", "R", "A", "B", "W", "V", "H")}
_KEYS = ("format", "graph", "graph_sha256", "budget_bytes", "scope", "bound", "denominator", "multipliers")
LARGEST = 1 << 512  # far above any honest number; Python cannot print one of more than 4,300 digits


class TreeNode(NamedTuple):
    """A node of a branch and bound over the window relaxation.

    Attributes:
        denominator, multipliers: as in `BoundCertificate`.
        column: ("S", k, k, v), ("R", k, m, i), ("U", k, j, v) or ("X", i, i, w); over a link ("S", k, k, v),
            ("R", k, m, i) or (A, B, W, V or H, j, j, v). It is 0 below node `zero`, 1 below `one`; None for a leaf.
    """

    denominator: int
    multipliers: Mapping[str, Sequence[Sequence[int]]]
    column: tuple[str, int, int, int] | None = None
    zero: int = 0
    one: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The node in the document."""
        branch = {} if self.column is None else {"column": list(self.column), "zero": self.zero, "one": self.one}
        return {"denominator": self.denominator, "multipliers": _listed(self.multipliers), **branch}


@dataclass(frozen=True, slots=True)
class BoundCertificate:
    """A lower bound on the cost of any plan of a scope within a budget, with its proof.

    Attributes:
        graph_name, graph_sha256, budget_bytes, scope: the problem.
        bound: in the graph's cost unit.
        denominator: of every multiplier.
        multipliers: [kind] entries ``[*row, y]`` with integers y > 0; kinds and rows as in `remat.bounds.certificate`.
        boundaries: of the window relaxation, operations in ascending order; empty for the staged LP. Over a link, -t
            stands for the start of operation t, and comes before t, its end.
        tree: of a branch and bound, the root first, children after their parents; empty for one LP. A tree's nodes have
            the multipliers.
        link: that plans may copy values over; the bound is on their makespan then. None for plans without copies.
    """

    graph_name: str
    graph_sha256: str
    budget_bytes: int
    scope: Scope
    bound: int
    denominator: int
    multipliers: Mapping[str, Sequence[Sequence[int]]]
    boundaries: Sequence[int] = ()
    tree: Sequence[TreeNode] = ()
    link: Link | None = None

    def to_dict(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {
            "format": LINK_FORMAT if self.link is not None else WINDOW_FORMAT if self.boundaries else FORMAT,
            "graph": self.graph_name,
            "graph_sha256": self.graph_sha256,
            "budget_bytes": self.budget_bytes,
            "scope": str(self.scope),
            "bound": self.bound,
            "denominator": self.denominator,
            "multipliers": _listed(self.multipliers),
            **({"boundaries": list(self.boundaries)} if self.boundaries else {}),
            **({"tree": [node.to_dict() for node in self.tree]} if self.tree else {}),
            **({"link": self.link.document()} if self.link is not None else {}),
        }

    @classmethod
    def from_dict(cls, content: Any, where: str) -> BoundCertificate:
        """The certificate in a document of `to_dict`, its form checked; `where` names the document in errors.

        Raises:
            InvalidInput: naming the place.
        """
        is_known = isinstance(content, dict) and str(content.get("format")) in KINDS
        _need(is_known, f"{where}: format is not {' or '.join(KINDS)}")
        for key in ("budget_bytes", "bound", "denominator"):
            _need(_is_integer(content.get(key)), f"{where}: {key} must be an integer, within 2**512")
        _need(content["budget_bytes"] >= 0, f"{where}: budget_bytes must be 0 or more")
        _need(content["denominator"] >= 1, f"{where}: the denominator must be positive, not {content['denominator']}")
        try:
            scope = parse_scope(content.get("scope", ""))
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        are_texts = isinstance(content.get("graph"), str) and isinstance(content.get("graph_sha256"), str)
        _need(are_texts, f"{where}: graph and graph_sha256 must be texts")
        problem = text_problem(content["graph"])
        _need(not problem, f"{where}: graph {problem}")
        _need(isinstance(content.get("multipliers"), dict), f"{where}: multipliers are missing")
        boundaries = _checked_boundaries(content, where)
        unknown = UnknownKeys()
        tree = _checked_tree(content, where)
        link = _checked_link(content, where)
        more = (["boundaries"] if boundaries else []) + (["tree"] if tree else []) + (["link"] if link else [])
        unknown.look(content, (*_KEYS, *more), "bound", "the bound")
        unknown.tell(where)
        return cls(
            content["graph"], content["graph_sha256"], content["budget_bytes"],
            scope, content["bound"], content["denominator"],
            _checked_multipliers(content["multipliers"], KINDS[content["format"]], where), boundaries, tree, link,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON, atomically; compressed if the name ends with ``.gz``."""
        write_text(path, json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BoundCertificate:
        """Read a certificate and check its form; `verify_bound` checks the proof.

        Raises:
            InvalidInput: naming the file and the place.
        """
        return cls.from_dict(read_json(path), os.fspath(path))


def better_proof(known: BoundCertificate | None, proof: BoundCertificate) -> BoundCertificate:
    """The one that proves more, the first of equals."""
    return proof if known is None or proof.bound > known.bound else known


def _is_integer(number: object) -> bool:
    """Whether it is a Python integer within `LARGEST`; neither a bool nor NumPy's, which overflows."""
    return type(number) is int and -LARGEST <= number <= LARGEST


def _need(holds: bool, problem: str) -> None:
    if not holds:
        raise InvalidInput(problem)


def _checked_boundaries(content: dict[str, Any], where: str) -> tuple[int, ...]:
    """Of the window relaxation; none in the first format."""
    if content["format"] == FORMAT:
        return ()
    found: Any = content.get("boundaries")
    are_integers = isinstance(found, list) and bool(found) and all(map(_is_integer, found))
    _need(are_integers, f"{where}: boundaries must be a list of operations")
    return tuple(found)


def _checked_link(content: dict[str, Any], where: str) -> Link | None:
    """Of the third format; none in the others."""
    if content["format"] != LINK_FORMAT:
        return None
    try:
        return Link.from_document(content.get("link"))
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from None


def _checked_tree(content: dict[str, Any], where: str) -> tuple[TreeNode, ...]:
    """The nodes, if there are any; only the window relaxation has a tree."""
    if "tree" not in content:
        return ()
    nodes = content["tree"]
    is_list = content["format"] in COLUMNS and isinstance(nodes, list) and bool(nodes)
    _need(is_list, f"{where}: tree must be a list of nodes, in {' or '.join(COLUMNS)}")
    _need(not any(content["multipliers"].values()), f"{where}: a tree's multipliers belong to its nodes")
    name = content["format"]
    return tuple(_checked_node(node, name, f"{where}: node {i} of the tree") for i, node in enumerate(nodes))


def _checked_node(node: Any, name: str, where: str) -> TreeNode:
    is_whole = isinstance(node, dict) and _is_integer(node.get("denominator"))
    _need(is_whole, f"{where} has no whole denominator")
    _need(isinstance(node.get("multipliers"), dict), f"{where} has no multipliers")
    multipliers = _checked_multipliers(node["multipliers"], KINDS[name], where)
    if node.keys() == {"denominator", "multipliers"}:
        return TreeNode(node["denominator"], multipliers)
    branch: list[Any] = [node.get(key) for key in ("column", "zero", "one")]
    column, zero, one = branch
    is_column = isinstance(column, list) and len(column) == 4 and column[0] in COLUMNS[name]
    is_branch = len(node) == 5 and is_column and all(map(_is_integer, (*column[1:], zero, one)))
    _need(is_branch, f"{where} must have a column of four, and the nodes zero and one")
    return TreeNode(node["denominator"], multipliers, tuple(column), zero, one)


def _listed(multipliers: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[list[int]]]:
    return {kind: [list(entry) for entry in rows] for kind, rows in multipliers.items()}


def _checked_multipliers(multipliers: Any, kinds: Mapping[str, int], where: str) -> dict[str, list[list[int]]]:
    for kind, rows in multipliers.items():
        _need(kind in kinds and isinstance(rows, list), f"{where}: multipliers of unknown kind {kind!r:.60}")
        for i, row in enumerate(rows):
            width = kinds[kind] + 1
            if kind == "knapsack" and isinstance(row, list) and len(row) % 2:
                width = max(width, len(row))
            if not isinstance(row, list) or len(row) != width or not all(map(_is_integer, row)):
                raise InvalidInput(f"{where}: multiplier {i} of kind '{kind}' must be {width} integers within 2**512")
    return multipliers
