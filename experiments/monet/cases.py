"""The solves of MONeT's parts: graphs by level of implementations, and a row for each case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from analysis.monet.points import ALGORITHMS, CPU, GIST, MILP, NO_WINOGRAD, NONE, OURS, P100, PROGRAM
from experiments.build import Subject
from experiments.monet import algorithms
from experiments.monet.published import Network
from experiments.parts import PartContext
from experiments.row import Row
from experiments.solving import GraphRun, solve_each
from remat.frontends.json import load_graph
from remat.frontends.monet import LEVELS, monet_graph, plain_pytorch
from remat.graph import Graph
from remat.registry import get_strategy
from remat.simulator import Trace, simulate

JOINT = "joint"  # all implementations, Winograd included
WINOGRAD = ("vgg16",)  # networks whose ablation has Winograd, whose costs are modelled
CONV = "conv"  # the level of `LEVELS` that adds Winograd
PROFILED_GPU = "p100"  # the device of the published costs


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done; never which networks or batches.

    Attributes:
        time_limit_s: of each solve.
        joint_factor: of the time limit, for a strategy that searches over implementations, on graphs that have some.
        all_budgets: take every published budget, else the largest, a middle one and the smallest.
        ablation_budgets: number of budgets at which each level is solved, the smallest first.
        monet_columns: MONeT's program with more columns is solved at the largest budget only.
        levels: of implementations in the ablation.
        halvings: number of halvings between a budget that is too small and one that suffices, see `ten_percent`.
    """

    time_limit_s: float
    joint_factor: float
    all_budgets: bool
    ablation_budgets: int
    monet_columns: int
    halvings: int
    levels: tuple[str, ...] = LEVELS


Context: TypeAlias = PartContext[Network, Scale]


@dataclass(frozen=True, slots=True)
class Case:
    """One solve.

    Attributes:
        level: of `LEVELS`, or `NO_WINOGRAD`, `P100`, `CPU`, `ALGORITHMS`, `JOINT` or `GIST`.
        cost_cap: if given, the solve only asks whether some plan costs no more.
    """

    network: str
    level: str
    strategy: str
    budget_bytes: int
    cost_cap: int | None = None


def asked_budgets(context: Context) -> tuple[int, ...]:
    """Budgets of the command line; () for the published ones."""
    single = context.settings.budget_bytes
    return context.settings.budgets_bytes or (() if single is None else (single,))


def budgets_of(context: Context, network: Network) -> tuple[int, ...]:
    """Budgets of the command line, or else the published ones; descending."""
    asked = asked_budgets(context)
    if asked:
        return tuple(sorted(set(asked), reverse=True))
    known = network.budgets_bytes
    return known if context.scale.all_budgets else (known[0], known[3], known[-1])


def published_graph(context: Context, network: Network) -> Graph | None:
    """The network's published graph with its costs; None without its file, or if the run is for another device."""
    file = context.published_file(network) if context.settings.gpu.name == PROFILED_GPU else None
    return None if file is None else load_graph(file)


def graph_of(context: Context, network: Network, level: str) -> Graph:
    """The network's training graph with the implementations of that level."""
    return graph_run_of(context, network, level).subject.graph


def pytorch_trace(context: Context, network: Network) -> Trace:
    """Plain PyTorch's own step, which every overhead is relative to."""
    graph = graph_of(context, network, NO_WINOGRAD)
    return simulate(graph, plain_pytorch(graph))


def graph_run_of(
    context: Context, network: Network, level: str, cost_cap: int | None = None, *, longer: bool = False
) -> GraphRun:
    """The solves of the graph of that level; `longer`: with a time limit longer by `Scale.joint_factor`."""
    level = JOINT if level == LEVELS[-1] else level

    def make() -> GraphRun:
        if cost_cap is None and not longer:
            # Every strategy that some part may run.
            strategies = dict.fromkeys((*context.settings.strategies, GIST, OURS, PROGRAM, MILP))
            return context.graph_run(_subject(context, network, level), "paper/monet", strategies=tuple(strategies))
        same = graph_run_of(context, network, level)
        limit = context.scale.time_limit_s * (context.scale.joint_factor if longer else 1)
        settings = replace(same.settings, time_limit_s=limit)
        graph_run = replace(same, settings=settings, cost_cap=cost_cap, kept={}, live={})
        context.graph_runs.append(graph_run)
        return graph_run

    return context.once((network.name, level, cost_cap, longer), make)


def joint_levels(network: Network) -> tuple[str, ...]:
    """The levels with all implementations at which a network is solved."""
    all_of_them = (NO_WINOGRAD, P100, CPU)
    return (*all_of_them, ALGORITHMS) if network.name == algorithms.NETWORK else all_of_them


def graph_run_of_case(context: Context, case: Case) -> GraphRun:
    """The graph run that solves a case."""
    network = next(network for network in context.networks if network.name == case.network)
    longer = case.level != NONE and get_strategy(case.strategy).implementations == "search"
    return graph_run_of(context, network, case.level, case.cost_cap, longer=longer)


def _subject(context: Context, network: Network, level: str) -> Subject:
    profile = published_graph(context, network)
    implementations = {GIST: NONE, **dict.fromkeys((NO_WINOGRAD, P100, CPU, ALGORITHMS), JOINT)}.get(level, level)
    graph = monet_graph(
        network.name, network.batch, implementations=implementations, profile=profile, gpu=context.settings.gpu,
        winograd=level in (CONV, JOINT), ratios={P100: "p100", ALGORITHMS: "p100", CPU: "cpu"}.get(level, "roofline"),
        gist=level == GIST,
    )  # fmt: skip
    graph = algorithms.with_algorithms(graph) if level == ALGORITHMS else graph
    if level != NONE:
        graph = replace(graph, name=f"{graph.name}_{level}")
    source = ("roofline", "modelled") if profile is None else ("profile", "file")
    return Subject(graph, network.name, "monet", "operation", network.batch, *source)


def solve(context: Context, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Solve the cases that the store lacks, in parallel; a document's entry for each case.

    It skips cases whose strategy the command line leaves out.
    """
    wanted = [case for case in dict.fromkeys(cases) if case.strategy in context.settings.strategies]
    new = [case for case in wanted if case not in context.rows]
    asked = [(graph_run_of_case(context, case), case.strategy, case.budget_bytes) for case in new]
    context.rows |= zip(new, solve_each(asked), strict=True)
    return [entry(case, context.rows[case]) for case in wanted]


def solve_gist(context: Context, network: Network) -> list[dict[str, Any]]:
    """Gist's plan, which is the same at every budget."""
    if GIST not in context.settings.strategies:
        return []
    graph_run = graph_run_of(context, network, GIST)
    family = graph_run.run_families([GIST])[GIST]
    plain = max(graph_run.store_all_peak_bytes, *(member.peak_bytes for member in family.members), 1)
    case = Case(network.name, GIST, GIST, plain)
    (context.rows[case],) = graph_run.family_rows(family, [plain])
    return [entry(case, context.rows[case])]


def entry(case: Case, row: Row) -> dict[str, Any]:
    """A document's entry for a solve; the rest is in the store.

    PyTorch's own step is the simulated one, except beside measured algorithms, where its logged time is known.
    """
    own = {"pytorch_cost": round(1e6 * algorithms.pytorch_ms())} if case.level == ALGORITHMS else {}
    return {**asdict(case), "key": row.key, **own}
