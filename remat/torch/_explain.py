"""An answer before the GPU: whether a step fits, what makes its peak, and what less memory costs."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

from torch import fx, nn

from remat.bounds.min_budget import min_budget
from remat.cost import CostWarning, Gpu, apply_cost, load_gpu
from remat.errors import InvalidInput, RematError
from remat.files import write_text
from remat.frontends.spec import ModelSpec, first_line, load_target, place_in_target
from remat.graph import Graph
from remat.plan import FREE, Plan
from remat.simulator import simulate
from remat.solution import Solution
from remat.solving.api import solve
from remat.torch import build
from remat.torch._explain_page import group_of, page_of
from remat.torch._optimizer import STATES, state_bytes
from remat.torch._private import module_path
from remat.torch._sizes import SizedStep
from remat.torch.graphs import captured_step
from remat.units import check_time_limit, format_size, parse_size

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the plain peak
OVERHEADS = (0.0, 0.05, 0.1, 0.2)
LENGTHS = ("length", "seq_len", "sequence_length", "seq_length")  # names that factories give the length of a sequence
GREATEST = 1 << 20  # size tried


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a step needs on a GPU.

    Attributes:
        graph: with costs in ns; its fixed bytes are parameters, buffers, inputs and optimizer state.
        modules: [V] path of the module that makes each value, or whose gradient it is.
        bytes_of: what is there throughout, and the gradients.
        budget_bytes: what is to suffice.
        plain, plan: the plain step, and the cheapest plan found within the budget; None without one.
        least_bytes: the smallest budget known to suffice.
        overheads: [share of the plain peak] of the cheapest plan found; None below the smallest budget.
        largest: [what grows, then overhead] largest size of which a step fits; None if not even the smallest does.
        changes: [what else] bytes that it adds to the plain peak; negative where it saves.
        refused: [what grows] why its largest sizes are not known.
    """

    name: str
    gpu: Gpu
    graph: Graph
    modules: tuple[str, ...]
    bytes_of: Mapping[str, int]
    budget_bytes: int
    plain: Plan
    plan: Plan | None
    least_bytes: int
    overheads: Mapping[float, float | None]
    largest: Mapping[str, Mapping[float, int | None]]
    changes: Mapping[str, int]
    refused: Mapping[str, str]

    @property
    def plain_peak_bytes(self) -> int:
        """Of the plain step."""
        return simulate(self.graph, self.plain).peak_bytes

    @property
    def fits(self) -> bool:
        """Whether the plain step fits."""
        return self.plain_peak_bytes <= self.budget_bytes

    def held_at_peak(self, plan: Plan) -> list[tuple[str, int]]:
        """(module, bytes of its values), the largest first, while the operation of the peak runs."""
        sizes = Counter[str]()
        for v in held_values(self.graph, plan, simulate(self.graph, plan).peak_computation):
            sizes[self.modules[v]] += self.graph.values[v].bytes
        return sizes.most_common()

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page of HTML that needs nothing else."""
        plans = {"The plain step": self.plain}
        if self.plan is not None and not self.fits:
            plans["The plan within the budget"] = self.plan
        title = f"{self.name} on {self.gpu.name}"
        write_text(path, page_of(title, str(self), self.graph, self.modules, plans, self.budget_bytes))

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def explain(
    factory: str | Callable[..., Any], *, gpu: str | None = None, budget: int | str | None = None,
    optimizer: str | int | None = "adamw", batch_size: int | None = None, time_limit_s: float = 2.0, threads: int = 2,
    **options: Any,
) -> Explanation:  # fmt: skip
    """What a training step needs on a GPU that need not be there. Nothing is computed, parameters take no memory.

    The step is captured on fake CPU tensors, in the types that the factory made. Costs are the GPU's roofline. Fused
    attention of the CPU stands for that of the GPU: it keeps the same tensors. Workspaces of a GPU's kernels and what
    its context holds are not counted.

    Args:
        factory: makes a module, (module, sample_args) or (module, sample_args, loss_fn); or ``package.module:factory``.
        gpu: its name. Its memory is the budget if none is given.
        budget: bytes, or a size such as ``24GB``. Without a GPU, costs are those of an h100.
        optimizer: a name as in `rematerialize`, or bytes of state.
        batch_size: for a factory that takes it.
        time_limit_s: of search, for each budget; half as long for each size that is tried.
        options: of the factory. One of ``length``, ``seq_len``, ``sequence_length`` is the length of its sequences.

    Raises:
        InvalidInput: neither GPU nor budget; the factory cannot be used, or its step cannot be captured.
        UnknownName: an unknown GPU or optimizer.
    """
    if gpu is None and budget is None:
        raise InvalidInput("name a GPU or a budget, e.g. gpu=h100 or budget=24GB")
    check_time_limit(time_limit_s)
    device = load_gpu(gpu or "h100")
    budget_bytes = device.memory_bytes if budget is None else parse_size(budget)
    state_bytes(optimizer, ())  # an unknown name is refused before the capture
    made = _Factory(factory, dict(options) | ({} if batch_size is None else {"batch_size": batch_size}))
    step, model = made.step({})
    made.graphs[()] = step.graph
    state = state_bytes(optimizer, model.parameters())
    modules = _modules(step.storage, len(step.graph.values))
    costed = _costed(step.graph, device, state)
    plain = Plan.from_order(costed, range(len(costed)))
    plain_peak_bytes = simulate(costed, plain).peak_bytes
    least = min_budget(costed, time_limit_s=time_limit_s).bytes

    def found(budget_bytes: int) -> Solution | None:
        return _cheapest(costed, budget_bytes, time_limit_s, 0.0, threads)

    overheads = dict[float, float | None]()
    for share in SHARES:
        solution = found(round(share * plain_peak_bytes))
        overheads[share] = None if solution is None else solution.overhead
    within = found(budget_bytes)
    largest, refused = dict[str, dict[float, int | None]](), dict[str, str]()
    for what, parameter, degree in made.growing():
        try:
            sized = made.sized(parameter, degree)
            growing = _Growing(
                lambda n, sized=sized: _costed(sized.at(n), device, state), budget_bytes, overheads, time_limit_s / 2,
                threads,
            )  # fmt: skip
            largest[what] = growing.largest(lambda n, p=parameter, sized=sized: sized.check(made.graph({p: n}), n))
        except InvalidInput as error:
            refused[what] = str(error)
    return Explanation(
        made.name, device, costed, modules, _bytes_of(model, costed, state), budget_bytes, plain,
        None if within is None else within.plan, least, overheads, largest,
        _changes(model, costed, optimizer, state), refused,
    )  # fmt: skip


class _Factory:
    """Makes steps of a model."""

    def __init__(self, factory: str | Callable[..., Any], options: dict[str, Any]):
        self.target = factory if isinstance(factory, str) else ""
        self.make: Callable[..., Any] = load_target(factory) if isinstance(factory, str) else factory
        self.options = options
        self.name = self.target.rpartition(":")[2] or getattr(factory, "__name__", "model")
        self.graphs: dict[tuple[tuple[str, int], ...], Graph] = {}  # [sizes other than those asked for]

    def step(self, sizes: Mapping[str, int]) -> tuple[Any, nn.Module]:
        """(the captured step at these sizes, its model)."""
        options: dict[str, Any] = {**self.options, **sizes}
        input_size = tuple(options.pop("input_size", ()))
        batch_size = options.get("batch_size", self._default("batch_size") or 1)
        if "batch_size" not in inspect.signature(self.make).parameters:
            options.pop("batch_size", None)
        spec = ModelSpec(self.name, "torch", self.target or self.name, batch_size, input_size, options=options)
        try:
            model, args, loss_fn = build.build(spec, self.make)
        except RematError:
            raise
        except Exception as error:  # the user's factory can raise anything
            place = place_in_target(error, self.target)
            raise InvalidInput(f"{spec.target} raised {first_line(error)}{place}") from error
        return captured_step(model, args, name=self.name, loss_fn=loss_fn), model

    def graph(self, sizes: Mapping[str, int]) -> Graph:
        """The step's graph at these sizes, without costs."""
        key = tuple((name, n) for name, n in sizes.items() if n != (self.options.get(name) or self._default(name)))
        if key not in self.graphs:
            self.graphs[key] = self.step(sizes)[0].graph
        return self.graphs[key]

    def growing(self) -> Iterator[tuple[str, str, int]]:
        """(what grows, its parameter, degree of bytes and work in it)."""
        if self._default("batch_size") or "batch_size" in self.options:
            yield "batch", "batch_size", 1
        name = next((n for n in LENGTHS if self._default(n) or n in self.options), None)
        if name is not None:
            yield "length", name, 2

    def sized(self, parameter: str, degree: int) -> SizedStep:
        """The step at any size of a parameter."""
        base = self.options.get(parameter) or self._default(parameter)
        assert base is not None
        sizes = [max(2, base // 2) * (i + 1) for i in range(degree + 1)]  # size 1 makes other operations
        return SizedStep.of(lambda n: self.graph({parameter: n}), sizes)

    def _default(self, parameter: str) -> int | None:
        known = inspect.signature(self.make).parameters.get(parameter)
        return known.default if known is not None and isinstance(known.default, int) else None


def _costed(graph: Graph, gpu: Gpu, state: int) -> Graph:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CostWarning)  # the costs are a model
        return replace(apply_cost(graph, "roofline", gpu), fixed_bytes=graph.fixed_bytes + state)


def _cheapest(graph: Graph, budget_bytes: int, limit_s: float, enough: float, threads: int) -> Solution | None:
    """The cheapest plan found within the budget; the search ends at an overhead of `enough`."""
    found = solve(
        graph,
        budget_bytes,
        "search",
        time_limit_s=limit_s,
        threads=threads,
        target_gap=max(1e-4, enough / (1 + enough)),
    )
    return found if found.plan is not None else None


@dataclass(slots=True)
class _Growing:
    """Looks for the largest size of a step that fits.

    Attributes:
        graph_at: [size] graph with costs.
        overheads: [share of the plain peak] of the step at hand, from which guesses come.
        peaks: [size] plain peaks that are known.
    """

    graph_at: Callable[[int], Graph]
    budget_bytes: int
    overheads: Mapping[float, float | None]
    limit_s: float
    threads: int
    peaks: dict[int, int] = field(default_factory=dict)

    def largest(self, check: Callable[[int], None]) -> dict[float, int | None]:
        """[overhead] the largest size whose cheapest plan within the budget costs no more.

        Args:
            check: raises if the graph at a size is not the real one; asked about the first size found.
        """
        found = {0.0: _last(lambda n: self._plain_peak(n) <= self.budget_bytes, 1, 0, exact=True)}
        check(max(2, found[0.0]))
        for overhead in OVERHEADS[1:]:
            share = min((s for s, o in self.overheads.items() if o is not None and o <= overhead), default=1.0)
            known = max(found.values())
            guess = _last(lambda n, share=share: share * self._plain_peak(n) <= self.budget_bytes, max(1, known), known)
            found[overhead] = _last(lambda n, overhead=overhead: self._fits(n, overhead), max(1, guess), known)
        return {overhead: size or None for overhead, size in found.items()}

    def _plain_peak(self, size: int) -> int:
        if size not in self.peaks:
            graph = self.graph_at(size)
            self.peaks[size] = simulate(graph, Plan.from_order(graph, range(len(graph)))).peak_bytes
        return self.peaks[size]

    def _fits(self, size: int, overhead: float) -> bool:
        if self._plain_peak(size) <= self.budget_bytes:
            return True
        found = _cheapest(self.graph_at(size), self.budget_bytes, self.limit_s, overhead, self.threads)
        return found is not None and found.overhead is not None and found.overhead <= overhead


def _last(fits: Callable[[int], bool], guess: int, known: int, exact: bool = False) -> int:
    """The largest size that fits, if all smaller ones do; within 1/32 of it unless `exact`.

    Args:
        known: it fits; 0 if none is known to.
    """
    low, high, step = known, GREATEST, max(1, guess // 16)
    at = max(guess, low + 1)
    while low < at < high:  # in growing steps away from the guess
        if fits(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
    while high - low > (1 if exact else max(1, low // 32)):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _bytes_of(model: nn.Module, graph: Graph, state: int) -> dict[str, int]:
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    loss = () if graph.loss is None else graph.operations[graph.loss].outputs
    return {
        "parameters": parameters,
        "optimizer state": state,
        "buffers and inputs": graph.fixed_bytes - parameters - state,
        "gradients": sum(value.bytes for v, value in enumerate(graph.values) if value.keep and v not in loss),
    }


def _changes(model: nn.Module, graph: Graph, optimizer: str | int | None, state: int) -> dict[str, int]:
    """Bytes that other choices add to the plain peak."""
    order = range(len(graph))
    peak = simulate(graph, Plan.from_order(graph, order)).peak_bytes
    kept = sum(value.bytes for value in graph.values if value.keep)
    # From the second step on the gradients are there before; each new one is added to them and freed.
    freed = tuple(replace(value, keep=False) for value in graph.values)
    added = replace(graph, values=freed, fixed_bytes=graph.fixed_bytes + kept)
    changes = {"gradient accumulation": simulate(added, Plan.from_order(added, order)).peak_bytes - peak}
    n_tensors = STATES.get(optimizer.lower(), 0) if isinstance(optimizer, str) else 0
    n_numbers = sum(p.numel() for p in model.parameters() if p.requires_grad) * n_tensors
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        if n_numbers and size * n_numbers != state:
            changes[f"{optimizer} in {dtype}"] = size * n_numbers - state
    return changes


def _modules(storage: Mapping[fx.Node, Any], n_values: int) -> tuple[str, ...]:
    """[V] path of the module that makes each value."""
    paths = [""] * n_values
    for node, values in storage.items():
        for v in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(v, int) and not paths[v]:
                paths[v] = module_path(node)
    return tuple(paths)


def held_values(graph: Graph, plan: Plan, i: int) -> set[int]:
    """Values that are held while computation `i` of a plan runs, its outputs included."""
    held, computed = set[int](), -1
    for kind, number in zip(plan.kinds.tolist(), plan.ids.tolist(), strict=True):
        if kind == FREE:
            held.discard(number)
            continue
        computed += 1
        held.update(graph.operations[number].outputs)
        if computed == i:
            break
    return held


def _lines(explained: Explanation) -> Iterator[str]:
    size = format_size
    yield f"{explained.name} on {explained.gpu.name}, within {size(explained.budget_bytes)}"
    for what, n_bytes in explained.bytes_of.items():
        yield f"  {what:<19} {size(n_bytes)}"
    graph, plain = explained.graph, simulate(explained.graph, explained.plain)
    fits = plain.peak_bytes <= explained.budget_bytes
    yield f"  plain peak          {size(plain.peak_bytes)}: {'fits' if fits else 'does not fit'}"
    at = graph.operations[int(plain.order[plain.peak_computation])]
    yield f"    while {at.name} ({at.kind}) runs; most is held by"
    held = Counter[str]()
    for module, n_bytes in explained.held_at_peak(explained.plain):
        held[group_of(module)] += n_bytes
    for group, n_bytes in held.most_common(5):
        yield f"      {group}: {size(n_bytes)}"
    yield f"  smallest budget     {size(explained.least_bytes, up=True)} (the smallest known to suffice)"
    if not fits:
        within = explained.plan
        overhead = None if within is None else simulate(graph, within).cost / graph.total_cost - 1
        yield f"  plan within budget  {'none was found' if overhead is None else f'{overhead:.1%} overhead'}"
    for share, overhead in explained.overheads.items():
        price = (overhead or 0) * graph.total_cost / 1e6 / ((1 - share) * plain.peak_bytes / 2**30)  # ms, GiB
        told = "no plan" if overhead is None else f"{overhead:.1%} overhead, {price:.3g} ms for each GiB saved"
        yield f"  at {share:.0%} of the peak  {told}"
    for what, sizes in explained.largest.items():
        told = ", ".join(f"{n or 'none'} at {overhead:.0%}" for overhead, n in sizes.items())
        yield f"  largest {what:<11} {told}"
    for what, n_bytes in explained.changes.items():
        yield f"  {what}: {'+' if n_bytes >= 0 else '-'}{size(abs(n_bytes))}"
    for what, why in explained.refused.items():
        yield f"  largest {what:<11} not known: {why}"
