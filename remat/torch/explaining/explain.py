"""An answer before the GPU: whether a step fits, what makes its peak, and what less memory costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from os import PathLike
from typing import Any

from remat.arena import places_in_words
from remat.cost import Gpu, link_of, load_gpu
from remat.errors import InvalidInput, check_name
from remat.files import write_bytes, write_text
from remat.graph import Graph
from remat.link import Link
from remat.plan import Plan
from remat.problem import SolveOptions
from remat.simulator import plain_peak, simulate
from remat.torch.explaining.factory import StepFactory
from remat.torch.explaining.gpu_kernels import library_bytes
from remat.torch.explaining.holding import GRADIENTS, PASSING, Holding, changes
from remat.torch.explaining.largest import Growing, KnownPlans
from remat.torch.explaining.page import page_of
from remat.torch.explaining.sizes import StepAtSizes
from remat.torch.explaining.snapshot import snapshot_of
from remat.torch.explaining.training import Training
from remat.torch.planning.replay import group_of, held_values
from remat.torch.step.aot import no_collection
from remat.units import format_size, parse_size

SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)  # of the plain peak
OVERHEADS = (0.0, 0.05, 0.1, 0.2)
WITH_COPIES = (0.0, 0.01, 0.05, 0.1, 0.2)  # copies that hide cost next to nothing, seldom nothing
CHUNKS = 16  # of the logits; a plan chooses their number
IMPLEMENTATIONS = ("default", "joint")
NEAR = 0.01  # of the plain peak: less is not worth a line
MOST_KINDS = 6  # kinds of tensors at the peak


@dataclass(frozen=True, slots=True)
class Copying:
    """What copies to the host change.

    Attributes: as of `Explanation`, of plans that recompute and copy.
    """

    link: Link
    plan: Plan | None
    least_bytes: int
    overheads: Mapping[float, float | None]
    largest: Mapping[str, Mapping[float, int | None]]


@dataclass(frozen=True, slots=True)
class InChunks:
    """What the step needs with the logits in chunks, as ``rematerialize(implementations="joint")`` may choose it.

    Attributes:
        peak_bytes: of the step as captured, everything kept.
        largest: as in `Explanation`; of overheads other than 0 only if they were asked for.
    """

    peak_bytes: int
    largest: Mapping[str, Mapping[float, int | None]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a step needs on a GPU.

    Attributes:
        shard: number of ranks, of which this is one; None: the model is not divided.
        trained: how many of the parameters, in which types.
        graph: with costs in ns; its fixed bytes are parameters, buffers, inputs and optimizer state.
        modules: [V] path of the module that makes each value, or whose gradient it is.
        captured: how, see `remat.torch.frontend.graphs.DescribedGraph`.
        bytes_of: what is there throughout, and the gradients.
        budget_bytes: what is to suffice.
        plain_peak_bytes: of PyTorch's own step, followed call by call.
        plain, plan: everything computed once in the captured order; the cheapest plan found within the budget, or None.
        least_bytes: the smallest budget known to suffice.
        overheads: [share of the plain peak] of the cheapest plan found; None below the smallest budget.
        largest: [what grows, then overhead] largest size of which a step fits; None if not even the smallest does.
        changes: [what else] bytes that it adds to the plain peak; negative where it saves.
        refused: [what grows] why its largest sizes are not known.
        copying: with copies over a link, if one was given.
        in_chunks: the step with the logits in chunks; None if its loss is no cross-entropy of a projection, which alone
            reads the logits, or of one rank.
    """

    name: str
    gpu: Gpu
    shard: int | None
    trained: str
    graph: Graph
    modules: tuple[str, ...]
    captured: str
    bytes_of: Mapping[str, int]
    budget_bytes: int
    plain_peak_bytes: int
    plain: Plan
    plan: Plan | None
    least_bytes: int
    overheads: Mapping[float, float | None]
    largest: Mapping[str, Mapping[float, int | None]]
    changes: Mapping[str, int]
    refused: Mapping[str, str]
    copying: Copying | None = None
    in_chunks: InChunks | None = None

    @property
    def fits(self) -> bool:
        """Whether the plain step fits."""
        return self.plain_peak_bytes <= self.budget_bytes

    def save(self, path: str | PathLike[str]) -> None:
        """Write a page of HTML that needs nothing else."""
        title = f"{self.name} on {self.gpu.name}"
        write_text(path, page_of(title, str(self), self.graph, self.modules, self._plans(), self.budget_bytes))

    def save_snapshot(self, path: str | PathLike[str]) -> None:
        """Write a file for PyTorch's memory visualizer (https://docs.pytorch.org/memory_viz).

        Its device 0 is the plain step; device 1 is the plan within the budget, if the plain step does not fit.
        """
        there = {name: n_bytes for name, n_bytes in self.bytes_of.items() if name not in (GRADIENTS, PASSING)}
        write_bytes(path, snapshot_of(self.graph, self.modules, there, [*self._plans().values()]))

    def _plans(self) -> dict[str, Plan]:
        plans = {"As captured, everything kept": self.plain}
        if self.plan is not None and not self.fits:
            plans["The plan within the budget"] = self.plan
        if self.copying is not None and self.copying.plan is not None and self.copying.plan.has_copies:
            plans[f"The plan within the budget that copies over {self.copying.link}"] = self.copying.plan
        return plans

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@no_collection()  # captured steps are a million objects each
def explain(
    factory: str | Callable[..., Any], *, gpu: str | None = None, budget: int | str | None = None,
    optimizer: str | int | None = "adamw", batch_size: int | None = None, shard: int | None = None,
    precision: str | None = None, lora: int | None = None, link: Link | str | None = None,
    implementations: str = "default", time_limit_s: float = 2.0, threads: int = 2, **options: Any,
) -> Explanation:  # fmt: skip
    """What a training step needs on a GPU that need not be there. Nothing is computed, parameters take no memory.

    The step is captured on fake CPU tensors, in the types that the factory made. Attention and RMS norms are the
    kernels that PyTorch chooses on the GPU, by rules (`gpu_kernels`), with the workspaces of attention's backward pass
    and of cuBLAS. Costs are the GPU's roofline. Other workspaces and CUDA's context are not counted.

    Args:
        factory: makes a module, (module, sample_args) or (module, sample_args, loss_fn); or ``package.module:factory``.
        gpu: its name. Its memory is the budget if none is given.
        budget: bytes, or a size such as ``24GB``. Without a GPU, costs are those of an h100.
        optimizer: a name as in `rematerialize`, or bytes of state.
        batch_size: for a factory that takes it.
        shard: number of ranks over which FSDP2 divides parameters, gradients and state; the answer is for one of them.
            What FSDP2 gathers in passing counts throughout, and its communication takes no time.
        precision: ``bf16``, ``fp32``, or ``mixed`` (parameters in float32, autocast to bfloat16); None: as the factory
            made the model.
        lora: rank of adapters beside the linear layers of the model's blocks; the rest is frozen.
        link: to the host's memory, e.g. ``pcie5`` or ``50GB/s``; ``auto`` is the GPU's own. It is also said then what
            plans that copy need.
        implementations: ``joint`` also searches the largest sizes with the logits in chunks that recompute something.
        time_limit_s: of search, for each budget; half as long for each size that is tried.
        options: of the factory. One of ``length``, ``seq_len``, ``sequence_length`` is the length of its sequences.

    Raises:
        InvalidInput: neither GPU nor budget; the factory cannot be used, its step cannot be captured, or its model
            cannot be divided.
        UnknownName: an unknown GPU, optimizer or precision.
    """
    if gpu is None and budget is None:
        raise InvalidInput("name a GPU or a budget, e.g. gpu=h100 or budget=24GB")
    SolveOptions(time_limit_s=time_limit_s, threads=threads).checked()
    device = load_gpu("h100" if gpu is None else gpu)
    copies_over = link_of(device, link)
    budget_bytes = device.memory_bytes if budget is None else parse_size(budget)
    if not budget_bytes:
        raise InvalidInput("the budget is 0; give a size such as 24GB")
    check_name("implementations", implementations, IMPLEMENTATIONS)
    training = Training(precision, lora)
    options |= {} if batch_size is None else {"batch_size": batch_size}

    made = StepFactory(factory, options, device, optimizer, shard, training, CHUNKS if shard is None else 0)
    step, known, model = made.step({})
    holding = made.holding(model)
    graph = holding.costed(holding.held(step.graph))
    plain_peak_bytes = holding.framework_peak(graph.fixed_bytes, known.needs)
    growing = _Sizes(made, holding, budget_bytes)
    with ThreadPoolExecutor(1) as pool:  # compiled code looks for plans of a block, while Python captures other sizes
        searched = pool.submit(KnownPlans, graph, time_limit_s, threads)
        growing.capture()
    plans = searched.result()
    least = min(plans.least(graph), plain_peak_bytes)
    shares = {share: round(share * plain_peak_bytes) for share in SHARES}
    found, largest, refused = _answers(graph, shares, least, plans, growing, OVERHEADS)
    copying = None
    if copies_over is not None:
        over = plans.over(copies_over)
        least_copying = min(least, over.least_copying(graph))
        with_copies, most, _ = _answers(graph, shares, least_copying, over, growing, WITH_COPIES)
        copying = Copying(copies_over, over.known(graph, budget_bytes), least_copying, with_copies, most)
    return Explanation(
        made.name, device, shard, training.describe(model), graph, step.modules, step.captured,
        holding.bytes_by_name(graph), budget_bytes, plain_peak_bytes, Plan.from_order(graph, range(len(graph))),
        plans.known(graph, budget_bytes), least, found, largest, changes(step.graph, model, holding, optimizer),
        refused, copying, _in_chunks(growing, plans, implementations == "joint"),
    )  # fmt: skip


def _answers(
    graph: Graph, shares: Mapping[float, int], least: int, plans: KnownPlans, sizes: _Sizes, overheads: Sequence[float]
) -> tuple[dict[float, float | None], dict[str, dict[float, int | None]], dict[str, str]]:
    """([share] overhead of a plan at so many bytes, then as `_Sizes.largest`)."""
    limit_s = plans.limit_s
    for each in (*shares.values(), sizes.budget_bytes):
        if each >= least:
            plans.cheapest(graph, each)
    plans.limit_s = limit_s / 2
    largest, refused = sizes.largest(plans, overheads)
    plans.limit_s = limit_s
    found = {share: plans.known(graph, budget) for share, budget in shares.items()}
    return {share: None if plan is None else _overhead(graph, plan) for share, plan in found.items()}, largest, refused


def _in_chunks(sizes: _Sizes, known: KnownPlans, searches: bool) -> InChunks | None:
    try:
        graph = sizes.holding.costed(sizes.holding.held(sizes.made.known_in_chunks({}).graph))
    except InvalidInput:
        return None
    plans = KnownPlans(graph, known.limit_s / 2 if searches else 0.0, known.threads, known.of_blocks)
    largest, _ = sizes.largest(plans, OVERHEADS if searches else OVERHEADS[:1], in_chunks=True)
    return InChunks(plain_peak(graph), largest)


class _Sizes:
    """The step at other sizes; each is captured once."""

    def __init__(self, made: StepFactory, holding: Holding, budget_bytes: int):
        self.made, self.holding, self.budget_bytes = made, holding, budget_bytes
        self.known = dict[tuple[str, bool], tuple[StepAtSizes, dict[int, Graph]]]()
        self.refused = dict[str, str]()  # [what grows] why its sizes cannot be captured

    def capture(self) -> None:
        """Capture what `largest` reads, but for logits in chunks."""
        for what, parameter, degree, unit in self.made.growing():
            try:
                self.known[what, False] = self.made.sized(parameter, degree, unit), {}
            except InvalidInput as error:
                self.refused[what] = str(error)

    def largest(
        self, plans: KnownPlans, overheads: Sequence[float], *, in_chunks: bool = False
    ) -> tuple[dict[str, dict[float, int | None]], dict[str, str]]:
        """([what grows, then overhead] the largest size, [what grows] why it is not known).

        Args:
            in_chunks: whether the logits are made in chunks.
        """
        largest, refused = dict[str, dict[float, int | None]](), dict[str, str]()
        for what, parameter, degree, unit in self.made.growing():
            if what in self.refused:
                refused[what] = self.refused[what]
                continue
            try:
                if (what, in_chunks) not in self.known:
                    self.known[what, in_chunks] = self.made.sized(parameter, degree, unit, in_chunks=in_chunks), {}
                (plain, _), (sized, steps) = self.known[what, False], self.known[what, in_chunks]
                growing = Growing(
                    partial(self._graph_at, sized), None if in_chunks else partial(self._peak_at, sized),
                    self.budget_bytes, plans, unit, learns=degree > 1 and plans.link is None, steps=steps,
                    apart=sized.apart,  # a size of 1, which is also the unit then
                )  # fmt: skip
                largest[what] = growing.largest(
                    overheads, lambda n, p=parameter, plain=plain: plain.check_needs(self.made.needs({p: n}), n)
                )
            except InvalidInput as error:
                refused[what] = str(error)
        return largest, refused

    def _graph_at(self, sized: StepAtSizes, n: int) -> Graph:
        return self.holding.costed(self.holding.held(sized.at(n).graph))

    def _peak_at(self, sized: StepAtSizes, n: int) -> int:
        fixed_bytes, needs = sized.without_graph(n)
        library = library_bytes(next(iter(sized.steps.values())).graph, self.holding.gpu)
        return self.holding.framework_peak(fixed_bytes + library, needs)


def _overhead(graph: Graph, plan: Plan) -> float:
    return simulate(graph, plan).cost / graph.total_cost - 1


def _lines(explained: Explanation) -> Iterator[str]:
    size, peak_bytes = format_size, explained.plain_peak_bytes
    rank = "" if explained.shard is None else f", one of {explained.shard} ranks"
    yield f"{explained.name} on {explained.gpu.name}{rank}, within {size(explained.budget_bytes)}"
    if explained.captured:
        yield f"  captured            {explained.captured}"
    yield f"  trained             {explained.trained}"
    for what, n_bytes in explained.bytes_of.items():
        yield f"  {what:<19} {size(n_bytes)}"
    yield f"  plain peak          {size(peak_bytes)}: {'fits' if explained.fits else 'does not fit'}"
    yield from _lines_of_peak(explained)
    yield from _lines_of_places(explained.graph, explained.plain if explained.fits else None)
    yield from _lines_of_plans(explained, explained)
    for what, why in explained.refused.items():
        yield f"  largest {what:<11} not known: {why}"
    if explained.in_chunks is not None:
        yield f"  logits in {CHUNKS} chunks  peak {size(explained.in_chunks.peak_bytes)} (implementations='joint')"
        for what, sizes in explained.in_chunks.largest.items():
            yield f"    largest {what:<9} {_sizes_at(sizes)}"
    if explained.copying is not None:
        yield f"  with copies to the host, {explained.copying.link}"
        yield from (f"  {line}" for line in _lines_of_plans(explained, explained.copying))
    yield "  the plain peak changes with"
    for what, n_bytes in explained.changes.items():
        yield f"    {what}: {'+' if n_bytes >= 0 else '-'}{size(abs(n_bytes))}"


def _lines_of_plans(explained: Explanation, found: Explanation | Copying) -> Iterator[str]:
    """What plans need, and what fits with them."""
    graph = explained.graph
    yield f"  smallest budget     {format_size(found.least_bytes, up=True)} (the smallest known to suffice)"
    if not explained.fits:
        overhead = None if found.plan is None else _overhead(graph, found.plan)
        yield f"  plan within budget  {'none was found' if overhead is None else f'{overhead:.1%} overhead'}"
        yield from _lines_of_places(graph, found.plan)
    for share, overhead in found.overheads.items():
        saved_gib = (1 - share) * explained.plain_peak_bytes / 2**30
        price = (overhead or 0) * graph.total_cost / 1e6 / saved_gib
        price_of = "no plan" if overhead is None else f"{overhead:.1%} overhead, {price:.3g} ms for each GiB saved"
        yield f"  at {share:.0%} of the peak  {price_of}"
    for what, sizes in found.largest.items():
        yield f"  largest {what:<11} {_sizes_at(sizes)}"


def _lines_of_places(graph: Graph, plan: Plan | None) -> Iterator[str]:
    """What an allocator needs for a plan."""
    if plan is not None:
        yield from (f"    {label:<16}  {text}" for label, text in places_in_words(graph, plan).items())


def _sizes_at(sizes: Mapping[float, int | None]) -> str:
    return ", ".join(f"{n or 'none'} at {overhead:.0%}" for overhead, n in sizes.items())


def _lines_of_peak(explained: Explanation) -> Iterator[str]:
    """What makes the peak of the captured step: the operation, and the tensors; those of all blocks together."""
    graph, trace = explained.graph, simulate(explained.graph, explained.plain)
    if abs(trace.peak_bytes - explained.plain_peak_bytes) > NEAR * explained.plain_peak_bytes:
        yield f"  as captured         {format_size(trace.peak_bytes)}: its operations save other tensors"
    at = graph.operations[int(trace.order[trace.peak_computation])]
    yield f"    while {at.name} ({at.kind}) runs; most is held by"
    n_tensors, sizes = Counter[str](), Counter[str]()
    for v in held_values(graph, explained.plain, trace.peak_computation):
        made_by = graph.operations[graph.producer[v]].kind.removeprefix("aten.")
        what = f"{made_by} of {group_of(explained.modules[v])}"
        n_tensors[what] += 1
        sizes[what] += graph.values[v].bytes
    for what, n_bytes in sizes.most_common(MOST_KINDS):
        yield f"      {n_tensors[what]} x {what}: {format_size(n_bytes)}"
