"""``experiment=max_batch_size``: the largest batch that trains, found and proven (Checkmate's Figure 6).

The paper's rule (Jain et al., MLSys 2020, section 6.4): a plan costs at most one forward pass more than plain
training, total cost <= 2 * forward + backward, FLOP costs, a 16 GB card. Memory and cost are linear in the
batch, so that one sample decides: its least peak within the cost cap gives the largest batch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from analysis.batches import draw, found_rows, limit_rows, rows_of
from analysis.published import PUBLISHED
from experiments.batch_search import RULES, Bisection, PerSample, per_sample
from experiments.build import Subject
from experiments.documents import Drawing, long_table, markdown_table
from experiments.registry import Case, Row, experiment
from experiments.settings import Settings
from experiments.solving import GraphRun, Solves, solve_each
from experiments.store import code_of
from remat.bounds.peak import peak_bound
from remat.errors import InvalidInput, RematError
from remat.plan import Plan
from remat.registry import get_strategy
from remat.simulator import plain_peak
from remat.solution import Family

SOLVES = 6  # time limits that one strategy may spend on one network
NAMES = [rule.name for rule in RULES]
DIRECT = "max_batch_milp"  # name of the direct formulation in documents and figures
DIRECT_STRATEGY = "checkmate_milp"  # it has the direct formulation as an option
PUBLISHED_ON_BYTES = 16 * 10**9  # memory of the GPU of the published batches


@experiment()
def max_batch_size(settings: Settings, time_limit: float = 10.0, batch_size: int | None = None) -> Iterator[Case]:
    """Largest batch on a 16 GB card with at most one more forward pass (Checkmate, Figure 6), found and proven."""
    if settings.spec is None:
        raise InvalidInput("experiment=max_batch_size runs models, not graph files; give model=")
    if batch_size is not None:
        raise InvalidInput("experiment=max_batch_size finds the batch size; leave batch_size out")
    code, name = code_of(*settings.strategies), f"{settings.spec.name}, {settings.gpu.name}"
    yield Case(measure, {"settings": settings.determining()}, code, name=name, solves=settings)


def measure(run: Solves, **_settings: Any) -> Iterator[Row]:
    """The document of one network.

    Raises:
        RematError: a claim is refuted, or no batch fits.
    """
    (document,) = max_batches(run, [run.settings])
    if document["contradicted"]:
        raise RematError("; ".join(["contradicted", *document["contradicted"]]))
    if not any(record["found"]["exact"] for record in document["records"]):
        raise InvalidInput("no batch fits")
    yield document


@max_batch_size.draws
def page(rows: Sequence[Row]) -> Drawing:
    """A table for each rule, all numbers, and the figure."""
    documents = list({row["network"]: row for row in rows}.values())
    text = "\n\n".join(
        markdown_table(
            [f"largest batch: {rule['label']}", *(document["network"] for document in documents)],
            [*found_rows(documents, rule["name"], str), *limit_rows(documents, rule["name"], str)],
        )
        for rule in documents[0]["rules"]
    )
    return Drawing(text, [long_table("max_batch_size", rows_of(documents))], {"max_batch_size": draw(documents)})


def max_batches(run: Solves, settings: Sequence[Settings]) -> list[dict[str, Any]]:
    """A document (JSON-ready) for each network, in the order of `settings`.

    Every solve is a row of the store, and a stored row is not solved again. The memory is the budget of the settings,
    or else their GPU's memory. Each solve gets `time_limit_s`, each strategy `SOLVES` times that.

    Raises:
        InvalidInput: memory or FLOPs of a network are not linear in the batch.
    """
    trials = []
    for one in settings:
        assert one.spec is not None
        with run.console.status(f"building {one.spec.name} ..."):
            network = per_sample(one.spec)
        trials.append(_Trial(run, network, one))
    for trial in trials:
        trial.run_families()
    _drive([search for trial in trials for search in trial.searches()])
    _drive([trial.direct() for trial in trials])
    return [trial.document() for trial in trials]


@dataclass(slots=True)
class _BatchSearch:
    """One strategy's bisection, with access to those of the other strategies on the same network."""

    strategy: str
    kind: str
    graph_run: GraphRun
    known: Bisection
    limit_s: float
    others: list["_BatchSearch"] = field(default_factory=list)

    @property
    def members(self) -> list["_BatchSearch"]:
        """Searches of the strategy's members."""
        names = get_strategy(self.strategy).members if self.kind == "solver" else ()
        return [other for other in self.others if other.strategy in names]

    def hear(self) -> None:
        """Take over the members' plans and all strategies' proofs so far."""
        known = self.known
        known.found_bytes = min([known.found_bytes, *(member.known.found_bytes for member in self.members)])
        known.excluded_bytes = max([0, *(other.known.proven_bytes for other in self.others)])

    def nearest_plan(self, budget: int) -> Plan | None:
        """The plan at the nearest budget, of this search or a member's: the next solve starts from it."""
        rows = [row for search in (self, *self.members) if (row := search.known.nearest_plan(budget)) is not None]
        return self.graph_run.plan_of(min(rows, key=lambda row: abs(row.budget_bytes - budget), default=None))

    def next_budget(self) -> int | None:
        """Budget of the next solve; None if the search or its time is over."""
        self.hear()
        return None if self.known.spent_s >= self.limit_s else self.known.next_budget()


@dataclass(slots=True)
class _Direct(_BatchSearch):
    """The direct formulation: one solve, at the budget of plain training, from the best plan of a heuristic."""

    start: Plan | None = None

    def nearest_plan(self, budget: int) -> Plan | None:
        return self.start

    def next_budget(self) -> int | None:
        return None if self.known.rows else self.graph_run.store_all_peak_bytes


class _Trial:
    """One network: its solves under each accounting, and the results of its strategies."""

    def __init__(self, run: Solves, network: PerSample, settings: Settings):
        self.network, self.settings = network, settings
        given = settings.budget_bytes
        self.memory_bytes = int(settings.gpu.memory_bytes if given is None else given)
        spec = settings.spec
        assert spec is not None
        subject = Subject(network.graph, spec.name, spec.framework, spec.granularity, 1, "flops", "modelled")
        self.plain_bytes = plain_peak(network.graph)
        self.proven_bytes = peak_bound(network.graph).bytes

        def graph_run(**changes: Any) -> GraphRun:
            return run.graph_run(subject, "max_batch_size", replace(settings, **changes), network.cost_cap)

        self.graph_runs = {accounting: graph_run(accounting=accounting) for accounting in ("exact", "published")}
        options = settings.options | {DIRECT_STRATEGY: {"formulation": "peak"}}
        total_s = SOLVES * settings.time_limit_s
        self.direct_run = graph_run(accounting="exact", options=options, time_limit_s=total_s)
        self.families: dict[tuple[str, str], Family] = {}  # by accounting and strategy
        self.found: list[_BatchSearch] = []

    def run_families(self) -> None:
        """Run the strategies that ignore the budget, under both accountings."""
        for accounting, graph_run in self.graph_runs.items():
            for name, family in graph_run.run_families(self.settings.strategies).items():
                self.families[accounting, name] = family

    def _bisection(self) -> Bisection:
        return Bisection(self.network, self.memory_bytes, RULES, self.plain_bytes, self.proven_bytes)

    def searches(self) -> list[_BatchSearch]:
        """A bisection for each strategy that depends on the budget.

        Its plans free values at their last use. One search therefore serves all rules, which only count other memory
        beside the peak.
        """
        graph_run, limit_s = self.graph_runs["exact"], SOLVES * self.settings.time_limit_s
        names = [name for name in self.settings.strategies if not get_strategy(name).ignores_budget]
        new = [_BatchSearch(name, "solver", graph_run, self._bisection(), limit_s) for name in names]
        for search in new:
            search.others = [other for other in new if other is not search]
        self.found += new
        return new

    def direct(self) -> _BatchSearch:
        """The search with the direct formulation, which starts from the best plan of a heuristic."""
        search = _Direct(DIRECT, "direct", self.direct_run, self._bisection(), SOLVES * self.settings.time_limit_s)
        members = [m for (accounting, _), f in self.families.items() if accounting == "exact" for m in f.members]
        allowed = [m for m in members if m.cost <= self.network.cost_cap]
        search.start = min(allowed, key=lambda m: m.peak_bytes).plan if allowed else None
        self.found.append(search)
        return search

    def document(self) -> dict[str, Any]:
        """All plans and proofs of the network, JSON-ready."""
        network = self.network
        records = [self._family_record(name) for name in dict.fromkeys(name for _, name in self.families)]
        for search in self.found:
            search.hear()
            known = search.known
            records.append(self._record(
                search.strategy, search.kind, dict.fromkeys(NAMES, None if known.stopped else known.found_bytes),
                known.proven_bytes, solves=len(known.rows), wall_s=known.spent_s, note=known.stopped,
                keys=[row.key for row in known.rows],
            ))  # fmt: skip
        proven = max([self.proven_bytes, *(search.known.proven_bytes for search in self.found)])
        published = PUBLISHED["checkmate"]["batches"].get(network.name, [])
        return {
            "network": network.name, "memory_bytes": self.memory_bytes, "parameter_bytes": network.parameter_bytes,
            "input_bytes": network.input_bytes, "total_cost": network.graph.total_cost,
            "forward_cost": network.forward_cost, "cost_cap": network.cost_cap,
            "graph_sha256": network.graph.sha256(), "gpu": self.settings.gpu.name,
            "time_limit_s": self.settings.time_limit_s, "working_set_bytes": network.graph.largest_working_set()[0],
            "rules": [{"name": rule.name, "label": rule.label} for rule in RULES],
            "proven_bytes": proven, "proven": self._batches(dict.fromkeys(NAMES, proven)),
            "records": records,
            "published": published if self.memory_bytes == PUBLISHED_ON_BYTES else [],
            "contradicted": [
                f"{network.name}: {search.strategy} has a plan of {search.known.found_bytes} bytes a sample, "
                f"but fewer than {proven} are claimed to be impossible"
                for search in self.found if search.known.found_bytes < proven
            ],
        }  # fmt: skip

    def _batches(self, sample_bytes: Mapping[str, int | None]) -> dict[str, int | None]:
        """[rule] batch that follows from the peak of one sample under that rule."""
        needed = [(rule, sample_bytes[rule.name]) for rule in RULES]
        return {
            rule.name: None if size is None else rule.batch(size, self.network, self.memory_bytes)
            for rule, size in needed
        }

    def _family_record(self, name: str) -> dict[str, Any]:
        """The family's member with the least peak within the cap; no search is needed."""
        peaks: dict[str, int | None] = {}
        notes = []
        for rule in RULES:
            family = self.families[rule.accounting, name]
            allowed = [m.peak_bytes for m in family.members if m.cost <= self.network.cost_cap]
            peaks[rule.name] = min(allowed, default=None)
            if not allowed:
                why = family.message or family.rejected or "none of its plans is within the cost cap"
                notes.append(f"{rule.accounting}: {why}")
        keys = [graph_run.key(name, None) for graph_run in self.graph_runs.values()]
        wall_s = sum(self.families[accounting, name].wall_s for accounting in self.graph_runs)
        note = "; ".join(dict.fromkeys(notes))
        return self._record(name, "family", peaks, None, solves=0, wall_s=wall_s, note=note, keys=keys)

    def _record(
        self, strategy: str, kind: str, found: Mapping[str, int | None], proven: int | None, **others: Any
    ) -> dict[str, Any]:
        """A strategy's result: bytes of one sample, by rule, and the batches that follow."""
        return {
            "strategy": strategy, "kind": kind, "found_bytes": found, "found": self._batches(found),
            "proven_bytes": proven, "proven": self._batches(dict.fromkeys(NAMES, proven)), **others,
        }  # fmt: skip


def _drive(searches: Sequence[_BatchSearch]) -> None:
    """Run searches through store and engine: in each round, every search that is not over does one solve."""
    while asked := [(search, budget) for search in searches if (budget := search.next_budget()) is not None]:
        rows = solve_each([
            (search.graph_run, DIRECT_STRATEGY if search.kind == "direct" else search.strategy, budget,
             partial(search.nearest_plan, budget))
            for search, budget in asked
        ])  # fmt: skip
        for (search, _), row in zip(asked, rows, strict=True):
            known = search.known
            known.learn(row)
            if search.kind == "direct":  # it also proves a bound on the peak itself
                known.undecided.clear()
                known.proven_bytes = max(known.proven_bytes, row.peak_bound_bytes or 0)
