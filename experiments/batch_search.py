"""Searches for the largest that trains: a batch of one strategy, by rules of counting; a size of any kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from experiments.per_sample import PerSample
from experiments.row import Row
from remat.solution import Status

_WITHOUT_ANSWER = (Status.SKIPPED, Status.FAILED)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a batch is counted from the peak of one sample.

    Attributes:
        accounting: of the heuristics' plans: frees at last use, or held as Checkmate's artifact counts them.
        counts_inputs: whether the input batch takes memory.
        times: how often parameters and their gradients (2P) are subtracted.
        label: for people.
    """

    name: str
    accounting: str
    counts_inputs: bool
    times: int
    label: str

    def batch(self, sample_bytes: int, network: PerSample, memory_bytes: int) -> int:
        """Samples that fit if each needs `sample_bytes` at the peak, its input aside."""
        return max(0, self._room(network, memory_bytes)) // max(1, sample_bytes + self._input(network))

    def sample_bytes(self, batch: int, network: PerSample, memory_bytes: int) -> int:
        """What one sample may need at most in a batch of `batch`, its input aside."""
        return max(0, self._room(network, memory_bytes) // batch - self._input(network))

    def _room(self, network: PerSample, memory_bytes: int) -> int:
        return memory_bytes - self.times * network.parameter_bytes

    def _input(self, network: PerSample) -> int:
        return network.input_bytes if self.counts_inputs else 0


# Numbers of different rules are never in one column. `published` is the artifact's own arithmetic: its peaks
# hold 2P already, and it subtracts 2P once more; `published_stated` is the rule that the paper states.
RULES = (
    Rule("exact", "exact", True, 1, "exact accounting"),
    Rule("published", "published", False, 2, "published accounting, 2P subtracted twice (the artifact)"),
    Rule("published_stated", "published", False, 1, "published accounting, 2P subtracted once (as stated)"),
)


@dataclass(slots=True)
class Bisection:
    """What is known of the least peak of one sample within the cost cap, and which budget to try next.

    A solve at a budget finds a plan within the cap, or proves that there is none, or ends undecided. The first
    question is the largest batch not ruled out (often met: a working set is the limit). Then batches between
    the largest found and the smallest undecided are halved; then, for a strategy that proves, those between the
    largest undecided and the smallest ruled out. When one rule is closed the next one is taken.

    Attributes:
        rules: in the order in which they are closed.
        found_bytes: smallest peak of a plan within the cap.
        proven_bytes: no staged plan within the cap has a smaller peak; proven by this strategy.
        excluded_bytes: the same, whoever proved it.
        undecided: budgets that were tried in vain.
        proves: whether it has ever proven anything.
        rows: of all solves, in order.
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
        """Seconds of all its solves, those taken from the store included."""
        return sum(row.wall_s for row in self.rows)

    def next_budget(self) -> int | None:
        """Bytes of one sample to try; None when there is nothing left to ask."""
        if self.stopped:
            return None
        for rule in self.rules:
            batch = self._next_batch(rule)
            if batch is not None:
                return rule.sample_bytes(batch, self.network, self.memory_bytes)
        return None

    def _next_batch(self, rule: Rule) -> int | None:
        found = rule.batch(self.found_bytes, self.network, self.memory_bytes)
        most = rule.batch(max(self.proven_bytes, self.excluded_bytes), self.network, self.memory_bytes)
        tried = [rule.batch(max(budget, 1), self.network, self.memory_bytes) for budget in self.undecided]
        tried = [batch for batch in tried if found < batch <= most]
        if found >= most:
            return None
        if not self.rows:
            return most
        least_tried = min(tried, default=most + 1)
        if least_tried - found > 1:
            return (found + least_tried) // 2
        if self.proves and most > max(tried, default=found):
            return (max(tried, default=found) + most + 1) // 2
        return None

    def learn(self, row: Row) -> None:
        """Take in a finished solve."""
        self.rows.append(row)
        if row.status in _WITHOUT_ANSWER:
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
        """The row with a plan whose budget is nearest: a start for the next solve."""
        planned = [row for row in self.rows if row.plan_file is not None]
        return min(planned, key=lambda row: abs(row.budget_bytes - budget_bytes), default=None)


@dataclass(slots=True)
class SizeSearch:
    """Grows a size until one is not found, then halves what lies between; sizes are integers from `first` on.

    Attributes:
        growth: factor from one size to the next.
        found: the largest size with a plan, 0 without any.
        ruled_out: the smallest size proven impossible; larger ones are taken to be impossible too.
        undecided: sizes tried in vain.
    """

    first: int
    growth: int = 2
    found: int = 0
    ruled_out: int | None = None
    undecided: list[int] = field(default_factory=list)

    def next_size(self) -> int | None:
        """What to try next; None if there is nothing between what is found and what failed."""
        failed = [size for size in (self.ruled_out, *self.undecided) if size is not None]
        if not failed:
            return self.growth * self.found if self.found else self.first
        least = min(failed)
        if self.found:
            return (self.found + least) // 2 if least - self.found > 1 else None
        return least // 2 if least > 1 else None

    def learn(self, size: int, *, fits: bool, impossible: bool) -> None:
        """Take in a trial."""
        if fits:
            self.found = max(self.found, size)
        elif impossible:
            self.ruled_out = size if self.ruled_out is None else min(size, self.ruled_out)
        else:
            self.undecided.append(size)
