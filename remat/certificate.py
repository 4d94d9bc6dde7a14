"""The form of a bound's certificate, a file that anyone can read; `remat.bounds.certificate` checks the proof."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat.errors import InvalidInput
from remat.files import UnknownKeys, read_json, write_text
from remat.graph import holds_control_character
from remat.plan import Scope, parse_scope

FORMAT, WINDOW_FORMAT = "remat-bound/1", "remat-bound/2"  # rows of the staged LP; of the window relaxation
# [format] how many numbers, at least, name a row of each kind
KINDS = {
    FORMAT: {"edge": 3, "continuity": 2, "memory": 1, "once": 2, "knapsack": 4},
    WINDOW_FORMAT: {"need": 3, "edge": 4, "continuity": 3, "join": 3, "each": 4, "memory": 1},
}
_KEYS = ("format", "graph", "graph_sha256", "budget_bytes", "scope", "bound", "denominator", "multipliers")
LARGEST = 1 << 512  # far above any honest number; Python cannot print one of more than 4,300 digits


@dataclass(frozen=True, slots=True)
class BoundCertificate:
    """A lower bound on the cost of any plan of a scope within a budget, with its proof.

    Attributes:
        graph_name, graph_sha256, budget_bytes, scope: the problem.
        bound: in the graph's cost unit.
        denominator: of every multiplier.
        multipliers: [kind] entries ``[*row, y]`` with integers y > 0; kinds and rows as in `remat.bounds.certificate`.
        boundaries: of the window relaxation, operations in ascending order; empty for the staged LP.
    """

    graph_name: str
    graph_sha256: str
    budget_bytes: int
    scope: Scope
    bound: int
    denominator: int
    multipliers: Mapping[str, Sequence[Sequence[int]]]
    boundaries: Sequence[int] = ()

    def to_dict(self) -> dict[str, Any]:
        """The document that `save` writes."""
        return {
            "format": WINDOW_FORMAT if self.boundaries else FORMAT,
            "graph": self.graph_name,
            "graph_sha256": self.graph_sha256,
            "budget_bytes": self.budget_bytes,
            "scope": str(self.scope),
            "bound": self.bound,
            "denominator": self.denominator,
            "multipliers": {kind: [list(entry) for entry in rows] for kind, rows in self.multipliers.items()},
            **({"boundaries": list(self.boundaries)} if self.boundaries else {}),
        }

    @classmethod
    def from_dict(cls, content: Any, where: str) -> BoundCertificate:
        """The certificate in a document of `to_dict`, its form checked; `where` names the document in errors.

        Raises:
            InvalidInput: naming the place.
        """
        if not isinstance(content, dict) or str(content.get("format")) not in KINDS:
            raise InvalidInput(f"{where}: format is not {' or '.join(KINDS)}")
        for key in ("budget_bytes", "bound", "denominator"):
            if not _is_integer(content.get(key)):
                raise InvalidInput(f"{where}: {key} must be an integer, within 2**512")
        if content["budget_bytes"] < 0:
            raise InvalidInput(f"{where}: budget_bytes must be 0 or more")
        try:
            scope = parse_scope(content.get("scope", ""))
        except InvalidInput as error:
            raise InvalidInput(f"{where}: {error}") from None
        if not isinstance(content.get("graph"), str) or not isinstance(content.get("graph_sha256"), str):
            raise InvalidInput(f"{where}: graph and graph_sha256 must be texts")
        if holds_control_character(content["graph"]):
            raise InvalidInput(f"{where}: graph holds a control character: {content['graph']!r:.60}")
        if not isinstance(content.get("multipliers"), dict):
            raise InvalidInput(f"{where}: multipliers are missing")
        boundaries = _checked_boundaries(content, where)
        unknown = UnknownKeys()
        unknown.look(content, (*_KEYS, "boundaries") if boundaries else _KEYS, "bound", "the bound")
        unknown.tell(where)
        return cls(
            content["graph"], content["graph_sha256"], content["budget_bytes"],
            scope, content["bound"], content["denominator"],
            _checked_multipliers(content["multipliers"], KINDS[content["format"]], where), boundaries,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the certificate as JSON, atomically."""
        write_text(path, json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BoundCertificate:
        """Read a certificate and check its form; `verify_bound` checks the proof.

        Raises:
            InvalidInput: naming the file and the place.
        """
        return cls.from_dict(read_json(path), os.fspath(path))


def _is_integer(number: object) -> bool:
    """Whether it is a Python integer within `LARGEST`; neither a bool nor NumPy's, which overflows."""
    return type(number) is int and -LARGEST <= number <= LARGEST


def _checked_boundaries(content: dict[str, Any], where: str) -> tuple[int, ...]:
    """Of the window relaxation; none in the first format."""
    if content["format"] == FORMAT:
        return ()
    boundaries = content.get("boundaries")
    if not isinstance(boundaries, list) or not boundaries or not all(map(_is_integer, boundaries)):
        raise InvalidInput(f"{where}: boundaries must be a list of operations")
    return tuple(boundaries)


def _checked_multipliers(multipliers: Any, kinds: Mapping[str, int], where: str) -> dict[str, list[list[int]]]:
    for kind, rows in multipliers.items():
        if kind not in kinds or not isinstance(rows, list):
            raise InvalidInput(f"{where}: multipliers of unknown kind {kind!r:.60}")
        for i, row in enumerate(rows):
            width = kinds[kind] + 1
            if kind == "knapsack" and isinstance(row, list) and len(row) % 2:
                width = max(width, len(row))
            if not isinstance(row, list) or len(row) != width or not all(map(_is_integer, row)):
                raise InvalidInput(f"{where}: multiplier {i} of kind '{kind}' must be {width} integers within 2**512")
    return multipliers
