"""The plan of a real training step: a `Plan` with its graph, its fingerprint, its file and its text."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from remat.arena import places_in_words
from remat.arena.certificate import checked_sharing
from remat.cost import Noise
from remat.errors import InvalidInput, InvalidPlan
from remat.execution.phases import Phases
from remat.files import write_text
from remat.graph import Graph, Operation
from remat.plan import OFFLOAD, PLAN_FORMAT_COPIES, Plan, read_document
from remat.simulator import Sharing, Trace, simulate
from remat.units import format_cost, format_size

SECTION = "execution"  # of a remat-plan/1 file
NOISE_FIELDS = {"scatter": float, "measured": int, "modelled": int}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of a captured training step; a plan is executed only on a step with the same fingerprint.

    Attributes:
        framework: ``torch`` or ``tensorflow``.
        version: of the framework; another version may trace other operations.
        inputs: shapes and dtypes of the sample arguments, for people.
        sha256: of the traced operations with their arguments, and of their values.
    """

    framework: str
    version: str
    inputs: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.framework} {self.version}, {self.inputs}, {self.sha256[:12]}"


def fingerprint_of(graph: Graph, framework: str, version: str, inputs: str) -> Fingerprint:
    """The fingerprint of a captured step; costs, workspaces and fixed bytes are not part of it."""

    def runs_once(op: Operation) -> bool:
        """False for producers of `keep` values: earlier versions could repeat them, and their plans must still fit."""
        return op.run_once and not any(graph.values[v].keep for v in op.outputs)

    content = [
        [
            [o.kind, o.work.signature if o.work else "", o.inputs, o.outputs, o.is_backward, runs_once(o)]
            for o in graph.operations
        ],
        [[v.bytes, v.keep] for v in graph.values],
    ]
    digest = hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
    return Fingerprint(framework, version, inputs, digest)


@dataclass(frozen=True, slots=True)
class Generated:
    """What a compiler makes of a plan.

    Attributes:
        peak_bytes: that its code holds above the graph's `fixed_bytes`.
        cost: of the kernels of its code, in the graph's unit.
        plain_cost: of the kernels of the compiled plain step.
        groups: numbers of consecutive computations that may be fused, and whose order the code keeps; () if the
            compiler may order all of them.
    """

    peak_bytes: int
    cost: int
    plain_cost: int
    groups: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class StepPlan:
    """The attribute `plan` of a rematerialized module; ``print`` it for a summary.

    Attributes:
        plan: the order of computations and frees.
        graph: the captured step with its costs and workspaces; the plan's ids refer to it.
        fingerprint: of the step that it was made for.
        strategy: that found it.
        budget_bytes: total that was promised; None for a plan made without a budget.
        plain_peak_bytes: peak of the framework's own step with the same fixed bytes, or None if not known.
        fixed: parts of ``graph.fixed_bytes`` in bytes, by name, e.g. ``parameters``.
        costs: cost model: ``profile``, ``roofline`` or ``flops``; '' if no operation had to be timed.
        implementations: which implementations its graph has: ``default``, ``exact`` or ``joint``.
        noise: of measured costs; None for other costs, or if not known.
        difference: of a step from the plain step, relative to the largest number of a tensor, if it was verified; 0
            for the same bits.
        generated: if a compiler fuses operations: what its code needs, instead of the sums over single operations.
        loss: what a loss outside of the module needs, and how that is known, for people; '' if there is none.
        retained_bytes: predicted peak if the graph is retained for several backward passes, where that is counted.
        added_s: seconds that planning added to the compiler's capture when the step first ran; None before.
        phases: where the seconds of planning it went; None for a plan of a file.
        sharing: [N] pairs (input, output) of each operation that may share a storage (see `simulate`); () for none.
    """

    plan: Plan
    graph: Graph
    fingerprint: Fingerprint
    strategy: str
    budget_bytes: int | None
    plain_peak_bytes: int | None
    fixed: Mapping[str, int]
    costs: str
    sharing: Sharing = ()
    implementations: str = "default"
    noise: Noise | None = None
    difference: float | None = None
    generated: Generated | None = None
    loss: str = ""
    retained_bytes: int | None = None
    added_s: float | None = None
    phases: Phases | None = None

    @functools.cached_property
    def trace(self) -> Trace:
        """The simulator's trace of the plan."""
        return simulate(self.graph, self.plan, self.sharing)

    @functools.cached_property
    def _runs(self) -> Generated:
        """What the code of a compiler needs, or else the plan's operations one by one."""
        if self.generated is not None:
            return self.generated
        return Generated(self.trace.peak_bytes - self.graph.fixed_bytes, self.trace.cost, self.graph.total_cost)

    @functools.cached_property
    def _places(self) -> tuple[str, ...]:
        """Lines about places; none if a compiler's code chooses what lives when. Found when first printed."""
        if self.generated is not None:
            return ()
        is_torch = self.fingerprint.framework == "torch"
        words = places_in_words(self.graph, self.plan, self.sharing, is_cuda=is_torch)
        return tuple(f"  {label:<14}  {text}" for label, text in words.items())

    def ran(self, added_s: float) -> None:
        """Note the seconds that planning added when the step first ran; the plan stays the same."""
        object.__setattr__(self, "added_s", added_s)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the whole step, fixed bytes included."""
        return self.graph.fixed_bytes + self._runs.peak_bytes if self.retained_bytes is None else self.retained_bytes

    @property
    def overhead(self) -> float:
        """Predicted cost over the cost of running every operation once, minus 1.

        Of a compiled step: over the cost of the compiled plain step, which may repeat operations itself.
        """
        return self._runs.cost / self._runs.plain_cost - 1 if self._runs.plain_cost else 0.0

    @property
    def recomputed(self) -> dict[str, int]:
        """Number of repeats of each repeated operation, by name."""
        repeats = self.trace.computations - 1
        return {self.graph.operations[k].name: int(repeats[k]) for k in np.nonzero(repeats)[0]}

    @property
    def offloaded(self) -> dict[str, int]:
        """Bytes of each value that is copied to the host, by name."""
        return {self.graph.values[v].name: self.graph.values[v].bytes for v in self._on_host}

    @property
    def _on_host(self) -> list[int]:
        return list(dict.fromkeys(self.plan.ids[self.plan.kinds == OFFLOAD].tolist()))

    @property
    def groups(self) -> tuple[int, ...]:
        """See `Generated.groups`."""
        return self._runs.groups

    @property
    def order(self) -> np.ndarray:
        """[computations] ids of operations, repeats included."""
        return self.plan.order

    def __repr__(self) -> str:
        promise = "" if self.budget_bytes is None else f" of {format_size(self.budget_bytes)}"
        copied = f"{len(self.offloaded)} values on the host meanwhile, " if self.plan.has_copies else ""
        return (
            f"<StepPlan of '{self.graph.name}': {len(self.graph)} operations, {len(self.recomputed)} computed again, "
            f"{copied}"
            f"peak {format_size(self.peak_bytes)}{promise}, overhead {self.overhead:.2%}>"
        )

    def __str__(self) -> str:
        graph, trace = self.graph, self.trace
        repeated = np.nonzero(trace.computations > 1)[0]
        lines = [
            f"{graph.name}: {len(graph)} operations, {len(repeated)} of them computed again ({self.strategy})",
            f"  made for        {self.fingerprint}",
        ]
        if self.budget_bytes is not None:
            lines.append(f"  budget          {format_size(self.budget_bytes)}")
        plain = self.plain_peak_bytes
        share = f", {self.peak_bytes / plain:.1%} of the plain step's {format_size(plain)}" if plain else ""
        where = f"; reached at {graph.operations[trace.order[trace.peak_computation]].name}"
        if self.generated is not None:
            where = "; the generated code's"
        if self.retained_bytes is not None:
            where = "; with the graph retained for several backward passes"
        lines += [
            f"  predicted peak  {format_size(self.peak_bytes)}{share}{where}",
            f"  always there    {format_size(graph.fixed_bytes)}{_parts(self.fixed)}",
            f"  overhead        {self._overhead_as_text()}",
        ]
        lines += self._places
        lines += [f"  loss outside    {self.loss}"] if self.loss else []
        repeats = collections.Counter(graph.operations[k].kind for k in repeated)
        total = collections.Counter(op.kind for op in graph.operations)
        choices = {(k, name) for k, name in zip(self.order.tolist(), self.plan.choices, strict=False) if name}
        if choices:
            implementations = collections.Counter(name for _, name in choices)
            lines.append(f"  implementations {', '.join(f'{name} {n}' for name, n in implementations.most_common())}")
        lines.append(f"  computed again  {_kinds_as_text(repeats, total) or 'nothing'}")
        lines += [self._copies_as_text()] if self.plan.has_copies else []
        if self.phases:
            lines.append(f"  planned in      {self.phases}")
        if self.difference is not None:
            bits = (
                "loss, gradients and buffers have the bits of the plain step, if it calls the module once and reads no "
                "weight outside of it"
            )
            differs = f"differs from the plain step by up to {self.difference:.1e} of a tensor's largest number"
            lines.append(f"  verified        {differs if self.difference else bits}")
        return "\n".join(lines)

    def _copies_as_text(self) -> str:
        values, graph = self._on_host, self.graph
        kinds = collections.Counter(graph.operations[graph.producer[v]].kind for v in values)
        n_bytes = sum(graph.values[v].bytes for v in values)
        return (
            f"  on the host     {len(values)} values meanwhile, {format_size(n_bytes)}, at most "
            f"{format_size(self.trace.host_peak_bytes)} at once, over {self.plan.link}: {_kinds_as_text(kinds)}"
        )

    def _overhead_as_text(self) -> str:
        if not self.costs:
            return "none; no operation had to be timed"
        noise = f"; {self.noise}" if self.noise else ""
        cost, once = (format_cost(c, self.graph.cost_unit) for c in (self._runs.cost, self._runs.plain_cost))
        return f"{self.overhead:.2%}: {cost} instead of {once} ({self.costs}{noise})"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan's file, atomically, with a section for execution without a solver."""
        section = {
            **asdict(self.fingerprint),
            "strategy": self.strategy,
            "plain_peak_bytes": self.plain_peak_bytes,
            "fixed": dict(self.fixed),
            "costs": self.costs,
            "cost_unit": self.graph.cost_unit,
            "noise": asdict(self.noise) if self.noise else None,
            "operation_costs": [op.cost for op in self.graph.operations],
            "workspace_bytes": [op.workspace_bytes for op in self.graph.operations],
        }
        if self.generated is not None:
            section["generated"] = asdict(self.generated)
        if self.graph.has_implementations:
            section["operators"] = self.implementations
            section["implementations"] = [
                [[each.name, each.cost, each.workspace_bytes] for each in op.implementations]
                for op in self.graph.operations
            ]
        if self.sharing:
            section["sharing"] = [list(map(list, pairs)) for pairs in self.sharing]
        document = replace(self.plan, budget_bytes=self.budget_bytes).document() | {SECTION: section}
        write_text(path, json.dumps(document, separators=(",", ":")))

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], graph: Graph, fingerprint: Fingerprint, fixed: Mapping[str, int]
    ) -> StepPlan:
        """Read a plan for a step captured here; costs and workspaces come from the file.

        Args:
            graph: captured here; its costs and workspaces are ignored.
            fixed: parts of ``graph.fixed_bytes`` here.

        Raises:
            InvalidPlan: the file is malformed, or made for another step (the message shows both fingerprints).
        """
        where, document = os.fspath(path), read_document(path)
        section = document.get(SECTION)
        if not isinstance(section, dict):
            raise InvalidPlan(f"{where}: has no '{SECTION}' section; save the plan of a rematerialized module")
        made_for = Fingerprint(**{f.name: str(section.get(f.name)) for f in fields(Fingerprint)})
        _check_made_for(made_for, fingerprint, where)
        costs, workspace = (_counts(section, key, len(graph), where) for key in ("operation_costs", "workspace_bytes"))
        operations = tuple(
            replace(op, cost=cost, workspace_bytes=size)
            for op, cost, size in zip(graph.operations, costs, workspace, strict=True)
        )
        graph = replace(graph, operations=operations, cost_unit=str(section.get("cost_unit", "")))
        implementations = str(section.get("operators", "default"))
        if implementations != "default":
            graph = _with_weights(graph, section, where)
        plan = _plan_of(document, graph, where)
        try:
            simulate(graph, plan)  # a file may hold any steps
        except InvalidPlan as error:
            raise error.of_file(where) from None
        known = _fixed_of(section, where)
        if known is None and document.get("graph_sha256") == graph.sha256():
            known = fixed
        plain = section.get("plain_peak_bytes")
        plain = _beside(fixed, plain if type(plain) is int else None, known)
        return cls(
            plan, graph, fingerprint, str(section.get("strategy", "")), plan.budget_bytes, plain, fixed,
            str(section.get("costs", "")), _sharing(section, graph, where), implementations, _noise_of(section),
            generated=_generated_of(section, len(plan.order), where),
        )  # fmt: skip

    def promising(self, budget_bytes: int | None) -> StepPlan:
        """This plan with another promised budget; None keeps its own.

        Raises:
            InvalidInput: the plan's peak is above the budget.
        """
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        if budget is not None and self.peak_bytes > budget:
            limit = "the budget it was made for," if budget_bytes is None else "the budget of"
            raise InvalidInput(
                f"the plan's peak here is {format_size(self.peak_bytes)}, above {limit} {format_size(budget)}"
                f"{_parts(self.fixed)}; plan again, or give a larger budget"
            )
        return replace(self, budget_bytes=budget)

    def moved(self, graph: Graph, fingerprint: Fingerprint, fixed: Mapping[str, int]) -> StepPlan:
        """This plan for the same step captured again, perhaps with other fixed bytes.

        Raises:
            InvalidPlan: it is another step (the message shows both fingerprints).
        """
        _check_made_for(self.fingerprint, fingerprint, "this plan")
        _check_implementations(self.order.tolist(), self.plan.choices, graph, "this plan")
        graph = replace(self.graph, fixed_bytes=graph.fixed_bytes)
        plan = self.plan.on(graph, self.budget_bytes)
        plain = _beside(fixed, self.plain_peak_bytes, self.fixed)
        return replace(self, plan=plan, graph=graph, plain_peak_bytes=plain, fixed=fixed)


class Planned:
    """Properties of a module or step that follows a plan."""

    plan: StepPlan

    @property
    def budget_bytes(self) -> int | None:
        """The promised budget in bytes, fixed bytes included; None for a plan made without a budget."""
        return self.plan.budget_bytes

    @property
    def predicted_peak_bytes(self) -> int:
        """Predicted peak of a step on the sample arguments, fixed bytes included."""
        return self.plan.peak_bytes

    @property
    def overhead(self) -> float:
        """Predicted cost of the step over that of running every operation once, minus 1."""
        return self.plan.overhead


def _check_made_for(made_for: Fingerprint, here: Fingerprint, where: str) -> None:
    if made_for != here:
        raise InvalidPlan(
            f"{where}: was made for {_what_differs(made_for, here)}\n  the plan's:  {made_for}\n  this step's: {here}"
        )


def _beside(fixed: Mapping[str, int], plain_peak_bytes: int | None, known: Mapping[str, int] | None) -> int | None:
    """A plain step's peak with the fixed bytes here, from its peak with the fixed bytes `known`.

    It leaves out parts that only a plan has (the executor's).
    """
    if plain_peak_bytes is None or known is None:
        return None
    return plain_peak_bytes + sum(size - known.get(name, 0) for name, size in fixed.items())


def _fixed_of(section: Mapping[str, Any], where: str) -> Mapping[str, int] | None:
    """The fixed bytes where a plan was made; None for older files, which do not have them."""
    fixed = section.get("fixed")
    if fixed is None:
        return None
    if not isinstance(fixed, dict) or not all(map(_is_count, fixed.values())):
        raise InvalidPlan(f"{where}: '{SECTION}.fixed' must be non-negative integers by name")
    return fixed


def _generated_of(section: Mapping[str, Any], n_computations: int, where: str) -> Generated | None:
    generated: Any = section.get("generated")
    if generated is None:
        return None
    names = {each.name for each in fields(Generated)}
    groups: Any = generated.get("groups") if isinstance(generated, dict) else None
    counts = [*groups, *(generated[name] for name in names - {"groups"})] if isinstance(groups, list) else [None]
    if generated.keys() != names or not all(map(_is_count, counts)) or sum(groups) not in (0, n_computations):
        raise InvalidPlan(f"{where}: '{SECTION}.generated' must hold counts: {', '.join(sorted(names))}")
    return Generated(**{**generated, "groups": tuple(groups)})


def _noise_of(section: Mapping[str, Any]) -> Noise | None:
    """The noise in the file; None if it is unreadable, because nothing depends on it."""
    noise: Any = section.get("noise")
    if not isinstance(noise, dict) or {name: type(x) for name, x in noise.items()} != NOISE_FIELDS:
        return None
    return Noise(**noise)


def _kinds_as_text(kinds: collections.Counter[str], total: Mapping[str, int] | None = None) -> str:
    """The most frequent kinds, each with its number, and of how many."""
    named = [
        f"{kind.removeprefix('aten.')} {n}{f' of {total[kind]}' if total else ''}" for kind, n in kinds.most_common(8)
    ]
    more = len(kinds) - len(named)
    return f"{', '.join(named)}{f' and {more} other kinds' if more else ''}"


def _parts(fixed: Mapping[str, int]) -> str:
    named = ", ".join(f"{name} {format_size(size)}" for name, size in fixed.items() if size)
    return f" ({named})" if named else ""


def _what_differs(plan: Fingerprint, here: Fingerprint) -> str:
    if plan.framework != here.framework:
        return f"{plan.framework}, not for {here.framework}"
    if plan.version != here.version:
        return f"{plan.framework} {plan.version}, this is {here.version}; plan again with this version"
    if plan.inputs != here.inputs:
        return f"inputs {plan.inputs}, not for {here.inputs}"
    return "another model (or another mode, dtype or set of trained parameters)"


def _counts(section: Mapping[str, Any], key: str, n: int, where: str) -> list[int]:
    numbers = section.get(key)
    if not isinstance(numbers, list) or len(numbers) != n or not all(map(_is_count, numbers)):
        raise InvalidPlan(f"{where}: '{SECTION}.{key}' must be {n} non-negative integers")
    return numbers


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


def implementations_of(path: str | os.PathLike[str]) -> str:
    """`StepPlan.implementations` of a saved plan.

    Raises:
        InvalidPlan: the file cannot be read.
    """
    section = read_document(path).get(SECTION)
    return str(section.get("operators", "default")) if isinstance(section, dict) else "default"


def copies_of(plan: StepPlan | str | os.PathLike[str]) -> bool:
    """Whether a plan, or a saved one, copies values to the host.

    Raises:
        InvalidPlan: the file cannot be read.
    """
    return plan.plan.has_copies if isinstance(plan, StepPlan) else read_document(plan)["format"] == PLAN_FORMAT_COPIES


def _plan_of(document: Mapping[str, Any], graph: Graph, where: str) -> Plan:
    """The plan in the file; if the graph has several implementations, with new frees at last use.

    The file's frees may not fit, because the ids of extra values depend on the implementations, which may differ here.
    """
    steps: Any = document.get("steps")
    if not graph.has_implementations or not isinstance(steps, list):
        return Plan.from_document(document, graph, where)
    computed = [step for step in steps if isinstance(step, list) and step[:1] == ["compute"]]
    frees = [step for step in steps if isinstance(step, list) and step[:1] == ["free"]]
    plan = Plan.from_document({**document, "steps": [step[:2] for step in computed]}, graph.default(), where)
    if len(computed) + len(frees) != len(steps):
        raise InvalidPlan(f"{where}: 'steps' must be ['compute', operation] or ['free', value] pairs")
    names = [str(step[2] or "") if len(step) > 2 else "" for step in computed]
    _check_implementations(plan.order.tolist(), names, graph, where)
    return Plan.from_order(graph, plan.order.tolist(), plan.budget_bytes, names)


def _check_implementations(order: Sequence[int], choices: Sequence[str], graph: Graph, where: str) -> None:
    """Raise `InvalidPlan` if the plan uses an implementation that this step does not have."""
    for k, name in dict.fromkeys(zip(order, choices, strict=False)):
        if name and all(implementation.name != name for implementation in graph.operations[k].implementations):
            raise InvalidPlan(
                f"{where}: runs '{graph.operations[k].name}' as '{name}', which is not available here (parameters may "
                "have changed so that a layer cannot be inverted); plan again"
            )


def _with_weights(graph: Graph, section: Mapping[str, Any], where: str) -> Graph:
    """The graph with only the implementations that the file has too, with the file's costs and workspaces."""
    rows: Any = section.get("implementations")
    if not isinstance(rows, list) or len(rows) != len(graph):
        raise InvalidPlan(f"{where}: '{SECTION}.implementations' must have an entry for each operation")
    operations = []
    for op, weights in zip(graph.operations, rows, strict=True):
        if not isinstance(weights, list) or not all(map(_is_weight, weights)):
            raise InvalidPlan(f"{where}: '{SECTION}.implementations' of '{op.name}' must be names, costs and bytes")
        known = {name: {"cost": cost, "workspace_bytes": size} for name, cost, size in weights}
        weighed = tuple(replace(each, **known[each.name]) for each in op.implementations if each.name in known)
        operations.append(replace(op, implementations=weighed))
    produced = {v for op in operations for each in op.all_implementations for v in each.outputs}
    if len(produced) < len(graph.values):  # only implementations that the file lacks produce the others
        raise InvalidPlan(f"{where}: was made where operations had fewer implementations; plan again")
    return replace(graph, operations=tuple(operations))


def _is_weight(row: Any) -> bool:
    """Whether it is the name, cost and workspace of an implementation."""
    return isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and all(map(_is_count, row[1:]))


def _sharing(section: Mapping[str, Any], graph: Graph, where: str) -> Sharing:
    try:
        return checked_sharing(section.get("sharing", []), graph)
    except InvalidInput as error:
        raise InvalidPlan(f"{where}: '{SECTION}': {error}") from None
