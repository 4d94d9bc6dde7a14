"""Lower bounds that anyone can check: multipliers in, exact integer arithmetic, no solver.

A bound comes with a multiplier for some rows of the staged relaxation (`remat.staged_model`). By weak
duality every choice of non-negative multipliers y proves a bound: summing y times the rows
``a x >= b`` and correcting with the reduced costs d = c - y A over the boxes 0 <= x <= 1 gives

    cost >= (cost of running everything once) + y b + sum over columns of min(0, d).

Nothing about the solver that found y has to be trusted. The rows are written down here once more,
straight from the definitions and apart from the model that was solved:

- edge (t, k, v): S[t,v] + R[t,p] - R[t,k] >= 0, operation k reads v, made by p (for k = t: >= 1);
- continuity (t, v): S[t,v] + R[t,p] - S[t+1,v] >= 0 (a kept value, t the last stage: >= 1);
- memory (t): what t reads, writes and needs as workspace, and every S[t+1,v] made before t and not
  read by t, fit the budget (what is left is rounded down to a multiple of their greatest common divisor);
- knapsack (t, right, v, a, v, a, ...): Sum of a S[t+1,v] <= right, if no set of these values that fits what
  the memory row of t leaves weighs more (checked by a dynamic program);
- once (t, k): R[t,k] + S[t,v] <= 1, v the one output of k (staged scope only).

R[t,k] with t <= k, and R and S after the last stage in which they can serve, are zero.

Where operations have several implementations, the rows are those of the relaxed graph (`remat.bounds.relax`, which
says why a bound there holds here): every operation at the least of its implementations. The checker relaxes the graph
that it is given itself, and the certificate names that graph, with all its implementations.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remat.bounds.cuts import MOST, is_valid
from remat.bounds.relax import relaxed
from remat.errors import InvalidInput
from remat.files import UnknownKeys, read_json, write_text
from remat.graph import Graph, check_graph, holds_control_character
from remat.plan import Scope, parse_scope
from remat.units import format_size, parse_size

FORMAT = "remat-bound/1"
KINDS = {"edge": 3, "continuity": 2, "memory": 1, "once": 2, "knapsack": 4}  # how many numbers name a row (or more)
_KEYS = ("format", "graph", "graph_sha256", "budget_bytes", "scope", "bound", "denominator", "multipliers")
LARGEST = 1 << 512  # no honest number comes near; beyond 4,300 digits Python cannot even print one


@dataclass(frozen=True, slots=True)
class BoundCertificate:
    """A lower bound on the cost of any plan of a scope within a budget, with its proof.

    Attributes:
        graph_name, graph_sha256, budget_bytes, scope: the problem it is about.
        bound: in the graph's cost unit.
        denominator: the multipliers are integers divided by it.
        multipliers: [kind] entries ``[*row, y]`` with y > 0; kinds and rows as in the module's docstring.
    """

    graph_name: str
    graph_sha256: str
    budget_bytes: int
    scope: Scope
    bound: int
    denominator: int
    multipliers: Mapping[str, Sequence[Sequence[int]]]

    def to_dict(self) -> dict[str, Any]:
        """What `save` writes."""
        return {
            "format": FORMAT,
            "graph": self.graph_name,
            "graph_sha256": self.graph_sha256,
            "budget_bytes": self.budget_bytes,
            "scope": str(self.scope),
            "bound": self.bound,
            "denominator": self.denominator,
            "multipliers": {kind: [list(entry) for entry in rows] for kind, rows in self.multipliers.items()},
        }

    @classmethod
    def from_dict(cls, content: Any, where: str) -> BoundCertificate:
        """Check the form of what `to_dict` made; `where` names it in errors.

        Raises:
            InvalidInput: naming the place.
        """
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise InvalidInput(f"{where}: format is not {FORMAT}")
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
        unknown = UnknownKeys()
        unknown.look(content, _KEYS, "bound", "the bound")
        unknown.tell(where)
        return cls(
            content["graph"], content["graph_sha256"], content["budget_bytes"],
            scope, content["bound"], content["denominator"],
            _checked_multipliers(content["multipliers"], where),
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, in one step."""
        write_text(path, json.dumps(self.to_dict(), separators=(",", ":")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> BoundCertificate:
        """Read and check a certificate's form; `verify_bound` checks what it claims.

        Raises:
            InvalidInput: naming the file and the place.
        """
        return cls.from_dict(read_json(path), os.fspath(path))


def _is_integer(number: object) -> bool:
    """Whether it is an integer of a size that can be meant; not a bool, nor NumPy's, which wrap."""
    return type(number) is int and -LARGEST <= number <= LARGEST


def _checked_multipliers(multipliers: Any, where: str) -> dict[str, list[list[int]]]:
    for kind, rows in multipliers.items():
        if kind not in KINDS or not isinstance(rows, list):
            raise InvalidInput(f"{where}: multipliers of unknown kind {kind!r:.60}")
        for i, row in enumerate(rows):
            width = KINDS[kind] + 1
            if kind == "knapsack" and isinstance(row, list) and len(row) % 2:
                width = max(width, len(row))
            if not isinstance(row, list) or len(row) != width or not all(map(_is_integer, row)):
                raise InvalidInput(f"{where}: multiplier {i} of kind '{kind}' must be {width} integers within 2**512")
    return multipliers


def verify_bound(
    graph: Graph,
    certificate: BoundCertificate | str | os.PathLike[str],
    *,
    budget: int | str | None = None,
    scope: str | None = None,
) -> int:
    """Check a certificate in exact integer arithmetic and return the bound that it proves.

    Needs no solver; the time is linear in the certificate, times the values for each memory row. Where operations have
    several implementations, the bound holds for every choice of them.

    Args:
        budget, scope: what the bound is to be used for. A certificate of a smaller budget, or of a narrower scope,
            proves nothing for them and is refused. By default they are the certificate's own.

    Returns:
        The certificate's bound: it holds for its `budget_bytes` (and every smaller one) and its `scope` (and every
        narrower one).

    Raises:
        InvalidInput: it is about another graph, budget or scope, is malformed, or proves less than it claims.
    """
    check_graph(graph)
    if isinstance(certificate, BoundCertificate):  # as strict as with a file: anyone may have made it
        try:
            certificate = BoundCertificate.from_dict(certificate.to_dict(), "the certificate")
        except (TypeError, AttributeError):
            raise InvalidInput("the certificate is malformed; see remat.BoundCertificate") from None
    elif isinstance(certificate, (str, os.PathLike)):
        certificate = BoundCertificate.load(certificate)
    else:
        raise InvalidInput(f"the certificate must be a remat.BoundCertificate or a file, not {certificate!r:.60}")
    if certificate.graph_sha256 != graph.sha256():
        raise InvalidInput(f"the bound is about another graph ({certificate.graph_name!r:.60}), not '{graph.name}'")
    if budget is not None and parse_size(budget) > certificate.budget_bytes:
        raise InvalidInput(f"the bound holds up to {format_size(certificate.budget_bytes)}, not for {budget}")
    if scope is not None and not certificate.scope.contains(parse_scope(scope)):
        raise InvalidInput(f"the bound holds for scope {certificate.scope}, not for {scope}")
    proven = proven_bound(
        graph, certificate.budget_bytes, certificate.scope, certificate.multipliers, certificate.denominator
    )
    if certificate.bound > proven:
        raise InvalidInput(f"the certificate claims a bound of {certificate.bound}, but proves only {proven}")
    return certificate.bound


def proven_bound(
    graph: Graph,
    budget_bytes: int,
    scope: Scope,
    multipliers: Mapping[str, Sequence[Sequence[int]]],
    denominator: int,
) -> int:
    """The bound that the multipliers prove, rounded up to an integer; never below the total cost's use of none.

    Raises:
        InvalidInput: a row that does not exist or is not valid in this scope, or a negative multiplier.
    """
    graph = relaxed(graph)
    if denominator < 1:
        raise InvalidInput(f"the denominator must be positive, not {denominator}")
    if scope is Scope.FREE and any(multipliers.values()):
        raise InvalidInput("the rows presume the order of first computations; they prove nothing for scope free")
    if scope is not Scope.STAGED and multipliers.get("once"):
        raise InvalidInput("rows of kind 'once' hold for scope staged only")
    n, operations, producer, values = len(graph), graph.operations, graph.producer, graph.values
    last_run, last_held = _last_stages(graph)
    right = 0  # y b
    weight_R: dict[tuple[int, int], int] = {}  # y A, by column
    weight_S: dict[tuple[int, int], int] = {}

    def provide(t: int, v: int, y: int) -> None:
        weight_S[t, v] = weight_S.get((t, v), 0) + y
        p = producer[v]
        if t <= last_run[p]:
            weight_R[t, p] = weight_R.get((t, p), 0) + y

    def wrong(kind: str, row: Sequence[int]) -> InvalidInput:
        return InvalidInput(f"the certificate uses the {kind} row {list(row)}, which does not exist")

    for kind, rows in multipliers.items():
        for *row, y in rows:
            if y < 0:
                raise InvalidInput(f"the multiplier of the {kind} row {row} is negative")
            t = row[0]
            if not 0 <= t < n:
                raise wrong(kind, row)
            if kind == "edge":
                k, v = row[1:]
                if not 0 <= k <= t or v not in operations[k].inputs or (k < t and t > last_run[k]):
                    raise wrong(kind, row)
                provide(t, v, y)
                if k == t:
                    right += y
                else:
                    weight_R[t, k] = weight_R.get((t, k), 0) - y
            elif kind == "continuity":
                v = row[1]
                if not 0 <= v < len(values) or not producer[v] < t < last_held[v]:
                    raise wrong(kind, row)
                provide(t, v, y)
                if t + 1 == n:  # only kept values reach the end
                    right += y
                else:
                    weight_S[t + 1, v] = weight_S.get((t + 1, v), 0) - y
            elif kind == "once":
                k = row[1]
                if not 0 <= k < t or len(operations[k].outputs) != 1 or t > last_run[k]:
                    raise wrong(kind, row)
                right -= y
                weight_R[t, k] = weight_R.get((t, k), 0) - y
                v = operations[k].outputs[0]
                weight_S[t, v] = weight_S.get((t, v), 0) - y
            elif kind == "knapsack":
                most, items, weights = row[1], row[2::2], row[3::2]
                distinct = len(set(items)) == len(items) == len(weights)
                if t + 1 == n or not 0 <= most <= MOST or not distinct or min(weights, default=0) < 1:
                    raise wrong(kind, row)
                for v in items:
                    if not 0 <= v < len(values) or not producer[v] < t < last_held[v] or v in operations[t].inputs:
                        raise wrong(kind, row)
                left = budget_bytes - graph.working_set_bytes(t)
                if not is_valid([values[v].bytes for v in items], weights, left, most):
                    raise InvalidInput(f"the knapsack row of stage {t} does not follow from its memory row")
                right -= y * most
                for v, a in zip(items, weights, strict=True):
                    weight_S[t + 1, v] = weight_S.get((t + 1, v), 0) - y * a
            else:  # memory
                op = operations[t]
                reads = set(op.inputs)
                left, unit = budget_bytes - graph.working_set_bytes(t), 0
                for v in range(len(values)):
                    if producer[v] < t and v not in reads and last_held[v] > t:
                        if t + 1 == n:  # kept; fixed_order may compute it again after the last operation
                            left -= values[v].bytes if scope is Scope.STAGED else 0
                        else:
                            weight_S[t + 1, v] = weight_S.get((t + 1, v), 0) - y * values[v].bytes
                            unit = math.gcd(unit, values[v].bytes)
                left -= left % unit if unit else 0  # the left side is a multiple of it
                right -= y * left
    total = right
    for (_, k), weight in weight_R.items():
        total += min(0, operations[k].cost * denominator - weight)
    for weight in weight_S.values():
        total += min(0, -weight)
    return graph.total_cost + -(-total // denominator)


def _last_stages(graph: Graph) -> tuple[list[int], list[int]]:
    """(per operation, per value) the last stage in which it can serve; N for kept values."""
    n = len(graph)
    last_run = list(range(n))
    last_held = list(graph.producer)
    for k in reversed(range(n)):
        for v in graph.operations[k].outputs:
            if graph.values[v].keep:
                last_held[v] = n
            for u in graph.users[v]:
                last_held[v] = max(last_held[v], last_run[u])
            if not graph.operations[k].run_once:
                last_run[k] = max(last_run[k], min(last_held[v], n - 1))
    return last_run, last_held
