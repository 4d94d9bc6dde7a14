"""The largest batch of a strategy: networks per sample, and the search under several counting rules.

The layer graph of a Keras network is affine in the batch: activations and the input grow with it, parameters do not.
Two extractions therefore give all others, and one sample decides the largest batch b:
fixed + b * peak(1 sample) <= memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from experiments.build import CACHE_FOLDER, extracted
from experiments.store import Row
from remat.cost import apply_cost
from remat.errors import InvalidInput
from remat.frontends.spec import ModelSpec
from remat.graph import Graph, Work
from remat.largest import SizeSearch
from remat.solution import Status


@dataclass(frozen=True, slots=True)
class PerSample:
    """One sample of a network with FLOP costs.

    Attributes:
        graph: one sample; its fixed bytes are 0, so that every byte in it is multiplied by the batch.
        parameter_bytes: parameters and their gradients, 2P.
        input_bytes: of one sample.
    """

    name: str
    graph: Graph
    parameter_bytes: int
    input_bytes: int

    @property
    def forward_cost(self) -> int:
        """Cost of one forward pass, including the loss."""
        return sum(op.cost for op in self.graph.operations if not op.is_backward)

    @property
    def unit_bytes(self) -> int:
        """The greatest common divisor of all sizes; every peak is a multiple of it."""
        sizes = (*(v.bytes for v in self.graph.values), *(op.workspace_bytes for op in self.graph.operations))
        return math.gcd(*sizes) or 1

    @property
    def cost_cap(self) -> int:
        """Checkmate's limit: at most one more forward pass, 2 * forward + backward."""
        return self.graph.total_cost + self.forward_cost


def per_sample(spec: ModelSpec, cache_folder: Path = CACHE_FOLDER) -> PerSample:
    """One sample of `spec`, for any batch size and accounting in it.

    A synthetic graph has no batch: it counts as one sample, and its fixed bytes count as parameters.

    Raises:
        InvalidInput: memory or cost of the network are not linear in the batch.
    """
    if spec.framework == "synthetic":
        graph = extracted(spec)
        return PerSample(spec.name, replace(graph, fixed_bytes=0), graph.fixed_bytes, 0)
    if spec.framework != "keras" or spec.granularity != "layer":
        raise InvalidInput(f"{spec.name}: the largest batch can be found for Keras models with layer granularity only")
    one, two = pair(spec, cache_folder)
    costs = [apply_cost(graph, "flops", None) for graph in (one, two)]
    for a, b in zip(costs[0].values, costs[1].values, strict=True):
        if b.bytes != 2 * a.bytes:
            raise InvalidInput(f"{spec.name}: value '{a.name}' has {a.bytes} bytes at batch 1 and {b.bytes} at batch 2")
    for a, b in zip(costs[0].operations, costs[1].operations, strict=True):
        if b.cost != 2 * a.cost or a.workspace_bytes or b.workspace_bytes:
            raise InvalidInput(f"{spec.name}: the cost of '{a.name}' is {a.cost} at batch 1 and {b.cost} at batch 2")
    input_bytes = two.fixed_bytes - one.fixed_bytes
    sample = replace(costs[0], fixed_bytes=0, name=f"{spec.name}_sample")
    return PerSample(spec.name, sample, one.fixed_bytes - input_bytes, input_bytes)


def pair(spec: ModelSpec, cache_folder: Path = CACHE_FOLDER) -> tuple[Graph, Graph]:
    """The graphs of one and of two samples without costs, inputs counted.

    Raises:
        InvalidInput: their operations differ.
    """
    sizes = (replace(spec, batch_size=b, accounting="exact") for b in (1, 2))
    one, two = (extracted(size, cache_folder / "graphs") for size in sizes)
    if [op.inputs for op in one.operations] != [op.inputs for op in two.operations]:
        raise InvalidInput(f"{spec.name}: its operations depend on the batch size")
    return one, two


def of_batch(one: Graph, two: Graph, batch: int) -> Graph:
    """The graph of `batch` samples without costs, on the line through those of one and of two samples."""

    def at(first: int, second: int) -> int:
        return first + (batch - 1) * (second - first)

    def work(a: Work | None, b: Work | None) -> Work | None:
        if a is None or b is None:
            return None
        flops = None if a.flops is None or b.flops is None else at(a.flops, b.flops)
        return replace(a, flops=flops, bytes_moved=at(a.bytes_moved, b.bytes_moved), published_flops=None, signature="")

    operations = tuple(
        replace(a, workspace_bytes=at(a.workspace_bytes, b.workspace_bytes), work=work(a.work, b.work))
        for a, b in zip(one.operations, two.operations, strict=True)
    )
    values = tuple(replace(a, bytes=at(a.bytes, b.bytes)) for a, b in zip(one.values, two.values, strict=True))
    return replace(
        one, name=f"{one.name.removesuffix('1')}{batch}", operations=operations, values=values,
        fixed_bytes=at(one.fixed_bytes, two.fixed_bytes),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rule:
    """How the largest batch follows from the peak of one sample.

    Attributes:
        accounting: ``exact`` or ``published``, for the heuristics' plans.
        counts_inputs: whether the input batch takes memory.
        times: how often parameters and their gradients (2P) are subtracted.
        label: text for people.
    """

    name: str
    accounting: str
    counts_inputs: bool
    times: int
    label: str

    def batch(self, sample_bytes: int, network: PerSample, memory_bytes: int) -> int:
        """Number of samples that fit if each needs `sample_bytes` at the peak, without its input."""
        return max(0, self._room(network, memory_bytes)) // max(1, sample_bytes + self._input(network))

    def sample_bytes(self, batch: int, network: PerSample, memory_bytes: int) -> int:
        """Most bytes that one sample may need at the peak in a batch of `batch`, without its input."""
        return max(0, self._room(network, memory_bytes) // batch - self._input(network))

    def _room(self, network: PerSample, memory_bytes: int) -> int:
        return memory_bytes - self.times * network.parameter_bytes

    def _input(self, network: PerSample) -> int:
        return network.input_bytes if self.counts_inputs else 0


# Numbers of different rules never share a column. `published` is the artifact's arithmetic: its peaks already
# contain 2P, and it subtracts 2P once more. `published_stated` is the rule that the paper states.
RULES = (
    Rule("exact", "exact", True, 1, "exact accounting"),
    Rule("published", "published", False, 2, "published accounting, 2P subtracted twice (the artifact)"),
    Rule("published_stated", "published", False, 1, "published accounting, 2P subtracted once (as stated)"),
)


@dataclass(slots=True)
class Bisection:
    """Bisection for the least peak of one sample within the cost cap: the results so far, and the next budget to try.

    A solve at a budget finds a plan within the cap, proves that there is none, or ends undecided. The first solve
    asks for the largest batch not ruled out (it often fits, because a working set is the limit). The next ones halve
    the range between the largest batch found and the smallest undecided one; then, if the strategy proves bounds,
    the range between the largest undecided and the smallest ruled out. Each rule is closed before the next one.

    Attributes:
        rules: in the order in which they are closed.
        found_bytes: smallest peak of a plan within the cap.
        proven_bytes: no staged plan within the cap has a smaller peak; proven by this strategy.
        excluded_bytes: the same, proven by any strategy.
        undecided: budgets whose solve ended undecided.
        proves: whether the strategy has ever proven anything.
        rows: of all solves, in order.
        stopped: why the search ended early, or ''.
    """

    network: PerSample
    memory_bytes: int
    rules: Sequence[Rule]
    found_bytes: int
    proven_bytes: int
    undecided: list[int] = field(default_factory=list)
    proves: bool = False
    rows: list[Row] = field(default_factory=list)
    stopped: str = ""
    excluded_bytes: int = 0

    @property
    def spent_s(self) -> float:
        """Seconds of all solves, including those found in the store."""
        return sum(row.wall_s for row in self.rows)

    def next_budget(self) -> int | None:
        """Bytes of one sample to try next; None when the search is over."""
        if self.stopped:
            return None
        for rule in self.rules:
            batch = self._next_batch(rule)
            if batch is not None:
                return rule.sample_bytes(batch, self.network, self.memory_bytes)
        return None

    def _next_batch(self, rule: Rule) -> int | None:
        found, most, *tried = (
            rule.batch(size, self.network, self.memory_bytes)
            for size in (self.found_bytes, max(self.proven_bytes, self.excluded_bytes), *self.undecided)
        )
        first = found if self.rows else most
        undecided = [batch for batch in tried if batch <= most]
        search = SizeSearch(first, found=found, ruled_out=most + 1, undecided=undecided, closes=self.proves)
        return search.next_size() if found < most else None

    def learn(self, row: Row) -> None:
        """Record a finished solve."""
        self.rows.append(row)
        if row.status in (Status.SKIPPED, Status.FAILED):
            self.stopped = f"{row.status}: {row.message}"
            return
        cap = self.network.cost_cap
        if row.cost is not None and row.cost <= cap and row.peak_bytes is not None:
            self.found_bytes = min(self.found_bytes, row.peak_bytes)
        elif row.status == Status.INFEASIBLE or (row.bound or 0) > cap:
            unit = self.network.unit_bytes
            self.proven_bytes = max(self.proven_bytes, (row.budget_bytes // unit + 1) * unit)
            self.proves = True
        else:
            self.undecided.append(row.budget_bytes)
            self.proves = self.proves or (row.bound or 0) > row.total_cost

    def nearest_plan(self, budget_bytes: int) -> Row | None:
        """The row with a plan at the nearest budget, from which the next solve can start."""
        planned = [row for row in self.rows if row.plan_file is not None]
        return min(planned, key=lambda row: abs(row.budget_bytes - budget_bytes), default=None)
