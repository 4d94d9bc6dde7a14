"""The plan: the order in which operations are computed, repeats included, and where values are freed and copied."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from remat.errors import InvalidInput, InvalidPlan, first_line, plain, shown, unknown_name, warn
from remat.files import MOST_PROBLEMS, NO_MORE, UnknownKeys, read_json, write_text
from remat.graph import Graph, Operation, check_graph, text_problem
from remat.implementation import DEFAULT, Implementation
from remat.link import Link, parse_link
from remat.units import MAX_BYTES, format_size

COMPUTE, FREE, OFFLOAD, PREFETCH, DROP = range(5)
_STEP_NAMES = ("compute", "free", "offload", "prefetch", "drop")
PLAN_FORMAT, PLAN_FORMAT_COPIES = "remat-plan/1", "remat-plan/2"  # the second one if values are copied


class Scope(StrEnum):
    """Which plans are allowed; each member contains the one before it."""

    STAGED = "staged"
    FIXED_ORDER = "fixed_order"
    FREE = "free"

    def contains(self, other: Scope) -> bool:
        """Whether every plan of scope `other` is also a plan of this scope."""
        order = list(Scope)
        return order.index(other) <= order.index(self)


def parse_scope(scope: str) -> Scope:
    """The scope of that name; raises `UnknownName`."""
    try:
        return Scope(scope)
    except ValueError:
        raise unknown_name("scope", scope, [str(s) for s in Scope]) from None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """A sequence of steps on one graph.

    With a link, values are copied to the host (`OFFLOAD`) and back (`PREFETCH`), and the host's copy is given up
    (`DROP`). A copy on the device stays until it is freed.

    Attributes:
        graph_name, graph_sha256: the graph it was made for.
        kinds: [steps] uint8, `COMPUTE`, `FREE`, `OFFLOAD`, `PREFETCH` or `DROP`.
        ids: [steps] int32, operation id of a compute step, value id of any other.
        implementations: [steps] name of each compute step's implementation, '' for the default one and for frees; ()
            if all are the default.
        budget_bytes: the budget it was made for, or None.
        scope: derived from the compute steps.
        link: that it was made for, or None.
    """

    graph_name: str
    graph_sha256: str
    kinds: np.ndarray
    ids: np.ndarray
    scope: Scope
    budget_bytes: int | None = None
    implementations: tuple[str, ...] = ()
    link: Link | None = None

    @classmethod
    def from_order(
        cls, graph: Graph, order: Sequence[int], budget_bytes: int | None = None, implementations: Sequence[str] = ()
    ) -> Plan:
        """A plan from computations alone; every value is freed at its last use.

        Args:
            implementations: [C] name of each computation's implementation, '' for the default one; () if all are.

        Raises:
            InvalidPlan: `order` or `implementations` names an operation or an implementation that does not exist.
        """
        steps = frees_at_last_use(graph, order, implementations)
        if not any(implementations):
            return cls.from_steps(graph, steps, budget_bytes)
        named = iter(implementations)
        return cls.from_steps(graph, [(k, i, next(named) if k == COMPUTE else "") for k, i in steps], budget_bytes)

    @classmethod
    def from_calls(cls, graph: Graph, calls: Iterable[tuple[int, str]], budget_bytes: int | None = None) -> Plan:
        """`from_order` of (operation, implementation) pairs, as `calls` gives them."""
        calls = list(calls)
        return cls.from_order(graph, [k for k, _ in calls], budget_bytes, [name for _, name in calls])

    @classmethod
    def from_steps(
        cls,
        graph: Graph,
        steps: Iterable[tuple[int | str, int] | tuple[int | str, int, str]],
        budget_bytes: int | None = None,
        link: Link | str | None = None,
    ) -> Plan:
        """A plan from ``(COMPUTE, operation)`` and ``(FREE, value)`` pairs; ``("compute", operation)`` is one, too.

        A third entry of a compute step names the implementation; '' or ``default`` is the default one.

        Raises:
            InvalidPlan: a step is no such pair, or names an operation, value or implementation that does not exist.
        """
        check_graph(graph)
        steps = _listed(steps, "steps")
        pairs = _pairs_of(steps)
        implementations = tuple(step[2] or "" if len(step) == 3 and step[2] != DEFAULT else "" for step in steps)
        limits = np.where(pairs[:, 0] == COMPUTE, len(graph), len(graph.values))
        wrong = np.nonzero((pairs[:, 1] < 0) | (pairs[:, 1] >= limits))[0]
        if len(wrong):
            _check_id(graph, int(pairs[wrong[0], 0]), int(pairs[wrong[0], 1]), int(wrong[0]))
        kinds, ids = pairs[:, 0].astype(np.uint8), pairs[:, 1].astype(np.int32)
        scope = scope_of_order(ids[kinds == COMPUTE], len(graph))
        if any(implementations):
            for step, (kind, k, name) in enumerate(zip(kinds.tolist(), ids.tolist(), implementations, strict=True)):
                if name:
                    if kind != COMPUTE:
                        raise InvalidPlan(f"a {_STEP_NAMES[kind]} has no implementation, but '{name}' is given", step)
                    implementation_of(graph, k, name, step)
        if not any(implementations):
            implementations = ()
        budget = _checked_budget(budget_bytes)
        return cls(graph.name, graph.sha256(), kinds, ids, scope, budget, implementations, parse_link(link))

    def on(self, graph: Graph, budget_bytes: int | None = None) -> Plan:
        """The same computations and copies on a graph with the same ids; without copies with new frees at last use."""
        if not self.has_copies:
            return Plan.from_order(graph, self.order.tolist(), budget_bytes, self.choices)
        return Plan.from_steps(graph, self.steps, budget_bytes, self.link)

    @classmethod
    def from_matrices(
        cls, graph: Graph, R_TN: np.ndarray, S_TV: np.ndarray | None = None, budget_bytes: int | None = None
    ) -> Plan:
        """A staged plan from Checkmate's matrices.

        Args:
            R_TN: [T, N] bool, operation i is computed in stage t (in the graph's order within a stage).
            S_TV: [T, V] bool, value v is resident at the start of stage t. With S, a value is freed after
                its last use in a stage unless the next stage's S holds it; without S, at its last use.
        """
        check_graph(graph)
        R_TN = _matrix("R", R_TN)
        if R_TN.ndim != 2 or R_TN.shape[1] != len(graph):
            raise InvalidPlan(f"R has shape {R_TN.shape}, expected (stages, {len(graph)})")
        order = np.nonzero(R_TN)[1]
        if S_TV is None:
            return cls.from_order(graph, order.tolist(), budget_bytes)
        return cls.from_steps(graph, _frees_by_stage(graph, R_TN, _matrix("S", S_TV)), budget_bytes)

    def __repr__(self) -> str:
        repeats = self.n_computations - len(np.unique(self.order))
        budget = "" if self.budget_bytes is None else f", made for {format_size(self.budget_bytes)}"
        copies = f", {np.count_nonzero(self.kinds == PREFETCH)} copies from the host" if self.has_copies else ""
        return (
            f"<Plan of '{self.graph_name}': {self.n_computations} computations, {repeats} of them repeats{copies}, "
            f"{self.scope}{budget}>"
        )

    @property
    def has_copies(self) -> bool:
        """Whether values are copied to the host."""
        return bool((self.kinds > FREE).any())

    @property
    def order(self) -> np.ndarray:
        """[computations] int32, the operations in the order computed, repeats included."""
        return self.ids[self.kinds == COMPUTE]

    @property
    def n_computations(self) -> int:
        return int(np.count_nonzero(self.kinds == COMPUTE))

    @property
    def choices(self) -> tuple[str, ...]:
        """[computations] name of each one's implementation, '' for the default one; () if all are the default."""
        return tuple(
            name for name, kind in zip(self.implementations, self.kinds.tolist(), strict=False) if kind == COMPUTE
        )

    @property
    def calls(self) -> list[tuple[int, str]]:
        """[computations] (operation, name of its implementation, '' for the default one)."""
        return list(zip(self.order.tolist(), self.choices or [""] * self.n_computations, strict=True))

    @property
    def steps(self) -> list[tuple[str, int] | tuple[str, int, str]]:
        """The steps as ``("compute", operation)`` and ``("free", value)``; a third entry names an implementation."""
        pairs = [(_STEP_NAMES[k], i) for k, i in zip(self.kinds.tolist(), self.ids.tolist(), strict=True)]
        if not self.implementations:
            return [*pairs]
        return [(*pair, name) if name else pair for pair, name in zip(pairs, self.implementations, strict=True)]

    def matrices(self, graph: Graph) -> tuple[np.ndarray, np.ndarray]:
        """(R_TN, S_TV): number of computations in each stage, residency at the start of each stage.

        A stage ends with the first computation of an operation; computations after the last stage's end
        count in the last stage. T = N.
        """
        check_graph(graph)
        n = len(graph)
        R_TN = np.zeros((n, n), dtype=np.int32)
        S_TV = np.zeros((n, len(graph.values)), dtype=bool)
        resident = np.zeros(len(graph.values), dtype=bool)
        seen = np.zeros(n, dtype=bool)
        stage, ended = 0, False
        for kind, i in zip(self.kinds.tolist(), self.ids.tolist(), strict=True):
            if kind != COMPUTE:
                resident[i] = kind == PREFETCH or (kind != FREE and resident[i])
                continue
            if ended and stage + 1 < n:
                stage, ended = stage + 1, False
                S_TV[stage] = resident
            R_TN[stage, i] += 1
            resident[list(graph.operations[i].outputs)] = True
            if not seen[i]:
                seen[i] = ended = True
        return R_TN, S_TV

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically: remat-plan/1, or remat-plan/2 if values are copied to the host."""
        write_text(path, json.dumps(self.document(), separators=(",", ":")))

    def document(self) -> dict[str, Any]:
        """The plan as `save` writes it."""
        head = {
            "format": PLAN_FORMAT_COPIES if self.has_copies else PLAN_FORMAT,
            "graph": self.graph_name,
            "graph_sha256": self.graph_sha256,
            "budget_bytes": self.budget_bytes,
            "scope": str(self.scope),
        }
        if self.has_copies and self.link is not None:
            head["link"] = self.link.document()
        return {**head, "steps": self.steps}

    def arena(
        self, graph: Graph, budget: int | str | None = None, time_limit_s: float = 10.0, *, alignment: int = 1
    ) -> Any:
        """A place for every byte of the plan: a `remat.Arena`, in which each output and workspace has an offset.

        Args:
            budget: total bytes, fixed bytes included, at which the search stops; None for the smallest block.
            time_limit_s: limits the call.
            alignment: of every offset, in bytes; sizes are rounded up to it.

        Raises:
            InvalidPlan: the plan cannot be executed on `graph`.
        """
        # By name, because arenas are made of plans: the layers of modules know no way up.
        found = importlib.import_module("remat.arena").find_arena
        return found(graph, self, budget, time_limit_s, alignment=alignment)

    @classmethod
    def load(cls, path: str | os.PathLike[str], graph: Graph) -> Plan:
        """Read a plan file made for `graph`; warn if the file does not name its graph by hash.

        Raises:
            InvalidPlan: names the file and the place; also if the plan was made for another graph.
        """
        check_graph(graph)
        document = read_document(path)
        where = os.fspath(path)
        sha = document.get("graph_sha256")
        if sha is not None and sha != graph.sha256():
            raise InvalidPlan(f"{where}: was made for graph {document.get('graph')!r:.80}, not for this '{graph.name}'")
        plan = cls.from_document(document, graph, where)
        if sha is None:
            warn(f"{where}: {WITHOUT_HASH}")
        return plan

    @classmethod
    def from_document(cls, document: Mapping[str, Any], graph: Graph, where: str) -> Plan:
        """The plan in such a document; the graph that the document names is not checked.

        Raises:
            InvalidPlan: names `where` and the place.
        """
        problems = plan_problems(document, graph)
        if problems:
            more = f" (and {len(problems) - 1} more; see remat check)" if len(problems) > 1 else ""
            raise problems[0].of_file(where, more)
        # A graph with default implementations only can read a plan for other implementations; it ignores their names.
        named = graph.has_implementations
        steps = [(_STEP_NAMES.index(kind), i, (name[0] or "") if named and name else "")
                 for kind, i, *name in document["steps"]]  # fmt: skip
        link = None if document.get("link") is None else Link.from_document(document["link"])
        return cls.from_steps(graph, steps, document.get("budget_bytes"), link)


def check_plan(plan: object) -> None:
    """Raise `InvalidInput` if `plan` is no `Plan`."""
    if not isinstance(plan, Plan):
        raise InvalidInput(f"plan must be a remat.Plan, not {type(plan).__name__}; a solution without a plan has None")


def _checked_budget(given: Any) -> int | None:
    if given is None:
        return None
    if not isinstance(given, (int, np.integer)) or isinstance(given, bool) or not 0 <= given <= MAX_BYTES:
        raise InvalidPlan(f"budget_bytes must be a number of bytes or None, not {shown(given)}")
    return int(given)  # NumPy's cannot be saved


def _listed(given: Any, what: str) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise InvalidPlan(f"{what} must be a list, not {shown(given)}") from None


def _pairs_of(steps: Sequence[Any]) -> np.ndarray:
    """[steps, 2] int64, kind and id of each step; their ids are unchecked."""
    try:
        pairs = np.array([step[:2] for step in steps]).reshape(-1, 2)
        sizes = set(map(len, steps))
    except (TypeError, ValueError, LookupError, OverflowError):
        pairs, sizes = np.empty((0, 2)), {0}
    if steps and (pairs.dtype.kind not in "iu" or not sizes <= {2, 3}):  # names, or no pairs
        return np.array([_pair_of(step, i) for i, step in enumerate(steps)], dtype=np.int64)
    pairs = pairs.astype(np.int64)
    wrong = np.nonzero((pairs[:, 0] < COMPUTE) | (pairs[:, 0] > DROP))[0]
    if len(wrong):
        _pair_of(steps[wrong[0]], int(wrong[0]))
    return pairs


def _pair_of(step: Any, i: int) -> tuple[int, int]:
    is_pair = isinstance(step, (tuple, list)) and 2 <= len(step) <= 3
    kind: Any = step[0] if is_pair else None
    if isinstance(kind, str) and kind in _STEP_NAMES:
        kind = _STEP_NAMES.index(kind)
    is_number = isinstance(kind, (int, np.integer)) and isinstance(step[1], (int, np.integer))
    if not is_number or not COMPUTE <= int(kind) <= DROP:
        raise InvalidPlan(f"not a (COMPUTE, operation) or (FREE, value) pair: {shown(step)}", i)
    return int(kind), max(-1, min(int(step[1]), 2**31))  # what is outside does not exist


_DOCUMENT_KEYS = ("format", "graph", "graph_sha256", "budget_bytes", "scope", "link", "steps", "execution")
WITHOUT_HASH = "has no 'graph_sha256', which every plan saved by remat has; it may have been made for another graph"


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in a plan file, its steps unchecked. Warns once of unknown keys.

    Raises:
        InvalidPlan: it cannot be read, or is no plan.
    """
    document = read_json(path, InvalidPlan)
    if not isinstance(document, dict) or document.get("format") not in (PLAN_FORMAT, PLAN_FORMAT_COPIES):
        raise InvalidPlan(f"{os.fspath(path)}: 'format' must be '{PLAN_FORMAT}' or '{PLAN_FORMAT_COPIES}'")
    unknown = UnknownKeys()
    unknown.look(document, _DOCUMENT_KEYS, "plan", "the plan")
    unknown.tell(path)
    return document


def plan_problems(document: Mapping[str, Any], graph: Graph | None = None) -> list[InvalidPlan]:
    """Everything wrong with the form of a plan document; with `graph`, also ids that do not exist in it."""
    found = []
    if not isinstance(document.get("graph"), str):
        found.append(InvalidPlan("'graph' must be a graph's name"))
    elif problem := text_problem(document["graph"]):
        found.append(InvalidPlan(f"'graph' {problem}"))
    sha = document.get("graph_sha256")
    if sha is not None and not isinstance(sha, str):
        found.append(InvalidPlan(f"'graph_sha256' must be text or left out, not {sha!r:.60}"))
    scope = document.get("scope")
    if scope is not None and scope not in [str(s) for s in Scope]:
        found.append(InvalidPlan(f"'scope' must be {', '.join(Scope)} or left out, not {scope!r:.60}"))
    budget = document.get("budget_bytes")
    if budget is not None and (type(budget) is not int or not 0 <= budget <= MAX_BYTES):
        found.append(InvalidPlan(f"'budget_bytes' must be an integer from 0 to {MAX_BYTES} or null"))
    if document.get("link") is not None:
        try:
            Link.from_document(document["link"])
        except InvalidPlan as error:
            found.append(error)
    steps = document.get("steps")
    if not isinstance(steps, list):
        return [*found, InvalidPlan("'steps' must be a list")]
    names = _STEP_NAMES if document.get("format") == PLAN_FORMAT_COPIES else _STEP_NAMES[: FREE + 1]
    for i, step in enumerate(steps):
        try:
            _check_step(step, i, graph, names)
        except InvalidPlan as error:
            found.append(error)
        if len(found) >= MOST_PROBLEMS:
            return [*found, InvalidPlan(NO_MORE)]
    return found


def _check_step(step: Any, i: int, graph: Graph | None, names: Sequence[str]) -> None:
    if not isinstance(step, list) or not 2 <= len(step) <= 3 or step[0] not in names or type(step[1]) is not int:
        more = "" if len(names) == FREE + 1 else f", and no {', '.join(names[FREE + 1 :])} of a value"
        raise InvalidPlan(f"not a ['compute', operation] or ['free', value] pair{more}: {step!r:.80}", i)
    name = step[2] if len(step) == 3 and step[2] is not None else ""
    if not isinstance(name, str):
        raise InvalidPlan(f"the implementation must be a name, not {name!r:.60}", i)
    if name and step[0] != _STEP_NAMES[COMPUTE]:
        raise InvalidPlan(f"a {step[0]} has no implementation, but {name!r:.60} is given", i)
    if graph is None:
        return
    kind = _STEP_NAMES.index(step[0])
    _check_id(graph, kind, step[1], i)
    if name and graph.has_implementations:
        implementation_of(graph, step[1], name, i)


def _check_id(graph: Graph, kind: int, i: int, step: int) -> None:
    limit = len(graph) if kind == COMPUTE else len(graph.values)
    if not 0 <= i < limit:
        what = "operation" if kind == COMPUTE else "value"
        raise InvalidPlan(f"{what} {i} does not exist (the graph has {limit})", step)


def implementation_of(graph: Graph, k: int, name: str, step: int) -> Implementation:
    """The implementation of operation `k` of that name; raises `InvalidPlan`."""
    try:
        return graph.implementation(k, name)
    except KeyError:
        known = ", ".join(implementation.name for implementation in graph.operations[k].all_implementations)
        raise InvalidPlan(
            f"operation {k} ({graph.operations[k].name}) has no implementation '{plain(name)}' (it has {known})", step
        ) from None


def frees_at_last_use(graph: Graph, order: Sequence[int], implementations: Sequence[str] = ()) -> list[tuple[int, int]]:
    """Insert a free after the last use of each computed copy of each value.

    A copy that no operation reads before the next copy (or the end) is freed right after its computation, unless the
    value must be kept. A copy is freed before its producer runs again, so that two copies are never held. An
    overwritten value needs no free.

    Args:
        implementations: [C] name of each computation's implementation, '' for the default one; () if all are.
    """
    check_graph(graph)
    operations, values = graph.operations, graph.values
    order, implementations = _listed(order, "the order"), _listed(implementations, "implementations")
    for step, k in enumerate(order):
        if not isinstance(k, (int, np.integer)):
            raise InvalidPlan(f"an operation's index is needed, not {shown(k)}", step)
        if not 0 <= k < len(operations):
            raise InvalidPlan(f"operation {k} does not exist (the graph has {len(operations)})", step)
    calls: Sequence[Operation | Implementation] = [operations[k] for k in order]
    overwritten: dict[int, int] = {}
    if any(implementations):
        if len(implementations) != len(order):
            raise InvalidPlan(f"{len(implementations)} implementations given for {len(order)} computations")
        named = enumerate(zip(order, implementations, strict=True))
        calls = chosen = [implementation_of(graph, k, name, step) for step, (k, name) in named]
        overwritten = {step: each.overwrites for step, each in enumerate(chosen) if each.overwrites is not None}
    # Walk backwards: a value is live at a step if it is read later, before it is produced again.
    live = [value.keep for value in values]
    frees_after: list[list[int]] = [[] for _ in order]
    for step in range(len(order) - 1, -1, -1):
        op = calls[step]
        for v in op.outputs:
            if not live[v]:
                frees_after[step].append(v)
            live[v] = False
        if step in overwritten:
            live[overwritten[step]] = True  # a later read of this copy is an error, which the simulator reports
        for v in op.inputs:
            if not live[v]:
                frees_after[step].append(v)
                live[v] = True
    steps: list[tuple[int, int]] = []
    for step, k in enumerate(order):
        steps.append((COMPUTE, k))
        steps.extend((FREE, v) for v in frees_after[step])
    return steps


def scope_of_order(order: Iterable[int], n_operations: int) -> Scope:
    """The narrowest scope that contains a plan with these computations."""
    next_first, last_in_stage, staged = 0, -1, True
    seen = bytearray(n_operations)
    for k in order:
        k = int(k)
        if not 0 <= k < n_operations:
            raise InvalidPlan(f"operation {k} does not exist (the graph has {n_operations})")
        if not seen[k]:
            if k != next_first:
                return Scope.FREE
            seen[k] = 1
            next_first, last_in_stage = k + 1, -1
        else:
            # A staged plan computes earlier operations in order, each at most once in a stage, and
            # ends with a first computation.
            staged = staged and last_in_stage < k and next_first < n_operations
            last_in_stage = k
    return Scope.STAGED if staged else Scope.FIXED_ORDER


def _matrix(name: str, rows: Any) -> np.ndarray:
    try:
        return np.asarray(rows, dtype=bool)
    except (ValueError, TypeError) as error:
        raise InvalidPlan(f"{name} is no matrix of 0 and 1: {first_line(error)}") from error


def _frees_by_stage(graph: Graph, R_TN: np.ndarray, S_TV: np.ndarray) -> list[tuple[int, int]]:
    """Steps of a staged plan in which S marks the values held from stage to stage."""
    n, n_values = len(graph), len(graph.values)
    if S_TV.shape != (R_TN.shape[0], n_values):
        raise InvalidPlan(f"R and S have shapes {R_TN.shape} and {S_TV.shape}, expected (T, {n}) and (T, {n_values})")
    if len(S_TV) and S_TV[0].any():
        raise InvalidPlan(f"S holds value {int(S_TV[0].argmax())} at the start of stage 0, before anything is computed")
    steps: list[tuple[int, int]] = []
    keep_at_end = np.array([value.keep for value in graph.values], dtype=bool)
    resident: set[int] = set()
    for t in range(R_TN.shape[0]):
        held = S_TV[t + 1] if t + 1 < len(S_TV) else keep_at_end
        computed = np.nonzero(R_TN[t])[0].tolist()
        last_use: dict[int, int] = {}
        for k in computed:
            for v in (*graph.operations[k].outputs, *graph.operations[k].inputs):
                last_use[v] = k
        drop_at: dict[int, list[int]] = {}
        for v, k in last_use.items():
            if not held[v]:
                drop_at.setdefault(k, []).append(v)
        for v in sorted(resident):
            if not held[v] and v not in last_use:
                steps.append((FREE, v))
                resident.discard(v)
        for k in computed:
            steps.append((COMPUTE, k))
            resident.update(graph.operations[k].outputs)
            for v in drop_at.get(k, ()):
                if v in resident:
                    steps.append((FREE, v))
                    resident.discard(v)
        missing = [v for v in np.nonzero(held)[0].tolist() if v not in resident]
        if missing and t + 1 < len(S_TV):
            raise InvalidPlan(f"S holds value {missing[0]} at the start of stage {t + 1}, but it is not resident then")
    return steps


def frees_held_to_end(graph: Graph, order: Sequence[int], held: Iterable[int]) -> list[tuple[int, int]]:
    """Like `frees_at_last_use`, but the last copy of each value in `held` stays to the end.

    This is the published accounting of Checkmate's artifact: baselines never drop their checkpoints.
    """
    steps = frees_at_last_use(graph, order)
    last_free = {i: at for at, (kind, i) in enumerate(steps) if kind == FREE}
    drop = {last_free[v] for v in held if v in last_free}
    return [step for at, step in enumerate(steps) if at not in drop]
