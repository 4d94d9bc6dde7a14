"""What the parts of ``experiment=paper/monet`` run with: graphs by level of implementations, one store, one engine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

import remat
from experiments.build import Subject
from experiments.engine import Engine
from experiments.monet.published import Network
from experiments.progress import SolveProgress
from experiments.row import Row
from experiments.settings import Settings
from experiments.solving import Bench, solve_each
from experiments.store import Store
from remat.frontends.json import load_graph
from remat.frontends.monet import LEVELS, monet_graph
from remat.graph import Graph

NONE, NO_WINOGRAD, JOINT, GIST = "none", "no_winograd", "joint", "gist"
PROFILED_GPU = "p100"  # the device of the published costs


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done; never which networks or batches.

    Attributes:
        time_limit_s: of each solve.
        joint_factor: by which the portfolio's is longer on graphs with implementations.
        all_budgets: every published budget, or the largest, a middle one and the smallest.
        ablation_budgets: at how many of them each level is solved, the smallest first.
        monet_columns: up to this size MONeT's program is solved at every budget, beyond at the largest alone.
        halvings: of the memory between a budget that is too small and one that is enough, see `ten_percent`.
    """

    time_limit_s: float
    joint_factor: float
    all_budgets: bool
    ablation_budgets: int
    monet_columns: int
    halvings: int


@dataclass(frozen=True, slots=True)
class Case:
    """One solve.

    Attributes:
        level: of `LEVELS`, or `NO_WINOGRAD`, `JOINT` or `GIST`.
        cost_cap: asked is only whether some plan costs no more.
    """

    network: str
    level: str
    strategy: str
    budget_bytes: int
    cost_cap: int | None = None


@dataclass(slots=True, eq=False)
class Desk:
    """One run.

    Attributes:
        levels: of the ablation.
        instances: folder of published graphs and records, or None.
        rows: [case] every row of this run.
    """

    settings: Settings
    scale: Scale
    networks: tuple[Network, ...]
    levels: tuple[str, ...]
    instances: Path | None
    store: Store
    engine: Engine
    progress: SolveProgress
    console: Console
    folder: Path
    rows: dict[Case, Row] = field(default_factory=dict)
    benches: dict[tuple[str, str, int | None, bool], Bench] = field(default_factory=dict)

    @property
    def asked_bytes(self) -> tuple[int, ...]:
        """Budgets of the command line; () for the published ones."""
        single = self.settings.budget_bytes
        return self.settings.budgets_bytes or (() if single is None else (single,))

    def budgets(self, network: Network) -> tuple[int, ...]:
        """Those of the command line, or the published ones; descending."""
        if self.asked_bytes:
            return tuple(sorted(set(self.asked_bytes), reverse=True))
        known = network.budgets_bytes
        return known if self.scale.all_budgets else (known[0], known[3], known[-1])

    def published_graph(self, network: Network) -> Graph | None:
        """The network's published graph with its costs; None if it is not at hand or for another device."""
        if self.instances is None or network.instance is None or self.settings.gpu.name != PROFILED_GPU:
            return None
        file = self.instances / network.instance
        return load_graph(file) if file.is_file() else None

    def graph(self, network: Network, level: str) -> Graph:
        """The network's training graph with the implementations of that level."""
        return self.bench(network, level).subject.graph

    def bench(self, network: Network, level: str, cost_cap: int | None = None, *, longer: bool = False) -> Bench:
        """Where the graph of that level is solved; `longer`: by `Scale.joint_factor`."""
        level = JOINT if level == LEVELS[-1] else level
        key = network.name, level, cost_cap, longer
        if key not in self.benches:
            if cost_cap is not None or longer:
                same = self.bench(network, level)
                limit = self.scale.time_limit_s * (self.scale.joint_factor if longer else 1)
                settings = replace(same.settings, time_limit_s=limit)
                self.benches[key] = replace(same, settings=settings, cost_cap=cost_cap, kept={}, live={})
            else:
                self.benches[key] = self._bench(network, level)
        return self.benches[key]

    def bench_of(self, case: Case) -> Bench:
        """Where a case is solved."""
        network = next(network for network in self.networks if network.name == case.network)
        return self.bench(
            network, case.level, case.cost_cap, longer=case.strategy == "portfolio" and case.level != NONE
        )

    def _bench(self, network: Network, level: str) -> Bench:
        profile = self.published_graph(network)
        built = {GIST: NONE, NO_WINOGRAD: JOINT}.get(level, level)
        graph = monet_graph(
            network.name, network.batch, implementations=built, profile=profile, gpu=self.settings.gpu,
            winograd=level != NO_WINOGRAD, gist=level == GIST,
        )  # fmt: skip
        if level != NONE:
            graph = replace(graph, name=f"{graph.name}_{level}")
        names = {*self.settings.strategies, "gist", "portfolio", "monet", "checkmate_milp"}
        options = {name: self.settings.options.get(name, {}) for name in names}
        source = ("roofline", "modelled") if profile is None else ("profile", "file")
        subject = Subject(graph, network.name, "monet", "operation", network.batch, *source)
        default = graph.default()
        peak = remat.simulate(default, remat.Plan.from_order(default, range(len(default)))).peak_bytes
        self.store.write_graph(graph)
        return Bench(subject, replace(self.settings, options=options), "paper/monet", self.store, self.engine,
                     self.progress, peak)  # fmt: skip

    def solve(self, cases: Sequence[Case]) -> list[dict[str, Any]]:
        """Solve what the store does not have, side by side; what documents hold of each.

        Strategies that the command line leaves out are left out.
        """
        wanted = [case for case in dict.fromkeys(cases) if case.strategy in self.settings.strategies]
        new = [case for case in wanted if case not in self.rows]
        asked = [(self.bench_of(case), case.strategy, case.budget_bytes) for case in new]
        for case, row in zip(new, solve_each(asked), strict=True):
            self.rows[case] = row
        return [entry(case, self.rows[case]) for case in wanted]

    def gist(self, network: Network) -> list[dict[str, Any]]:
        """Gist's one plan, whatever the budget."""
        if GIST not in self.settings.strategies:
            return []
        bench = self.bench(network, GIST)
        family = bench.run_families([GIST])[GIST]
        plain = max(bench.store_all_peak_bytes, *(member.peak_bytes for member in family.members), 1)
        case = Case(network.name, GIST, GIST, plain)
        (self.rows[case],) = bench.family_rows(family, [plain])
        return [entry(case, self.rows[case])]

    def relative_store(self) -> str:
        """The store as seen from the run's folder."""
        return os.path.relpath(self.store.folder, self.folder)

    def say(self, line: str) -> None:
        """A line to the user."""
        self.console.print(line, markup=False, soft_wrap=True)


def entry(case: Case, row: Row) -> dict[str, Any]:
    """What documents hold of a solve: the rest is in the store."""
    return {**asdict(case), "key": row.key}
