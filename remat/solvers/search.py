"""Annealed search over staged plans: it finds good plans fast."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from remat.bounds.min_budget import MinBudget, min_budget
from remat.compiled import is_compiled
from remat.context import Context
from remat.errors import Skip
from remat.graph import Graph
from remat.plan import Plan, Scope
from remat.problem import Problem
from remat.registry import Strategy, get_strategy, strategies, strategy
from remat.search.anneal import Best, Calls, Reporter, minimise_cost, on_threads
from remat.search.chain import chain_plan
from remat.search.greedy import SHORT_S, greedy_eviction, greedy_plans
from remat.search.kernel import LARGE
from remat.search.online import online_plan
from remat.search.ordering.anneal import anneal_orders
from remat.search.ready import is_ready, ready_by
from remat.search.sequence import FREE, NOTHING, STAGED, Sequencer
from remat.simulator import simulate
from remat.solution import Candidate, Outcome, candidates_of

FAMILY_SHARE = 0.2  # of the time, for baselines if greedy eviction fails
# For a plan where eviction finds none: most time, share of the time, and what a short limit gives, up to half of it.
LEAN_S, LEAN_SHARE, LEAST_LEAN_S, MOST_LEAN = 5.0, 0.2, 0.5, 0.5
BLOCKS_SHARE = 0.5  # of the time, for plans of a block that repeats
MOVES_PER_S = 20_000  # in a deterministic run: the speed of a slow machine
QUICK_MOVES, QUICK_SHARE = 20_000, 0.1  # most moves, and largest share of the time, for a plan to start from
FIRST_CYCLE_S = 8.0  # of the search, about; each cycle is twice as long as the one before
# Of sequences: the first temperatures, and most moves per operation. A hot one begins from every operation once, the
# others from the best plan. A medium one cools to better plans on networks; a hot one does so on random graphs, where
# eviction finds no plan or a poor one.
HOT, MEDIUM, WARM, MOVES = 1.0, 0.3, 0.1, 5000
INTERVALS = 0.0
# Steps of a cycle: shares of its time, with INTERVALS or the first temperature of a sequence.
HOT_CYCLE = ((0.55, HOT), (0.2, INTERVALS), (0.25, WARM))
AFTER = ((0.15, INTERVALS), (0.15, WARM), (0.15, INTERVALS), (0.15, WARM))  # a medium or warm sequence
SMALL, SMALL_CYCLE = 600, ((0.85, INTERVALS), (0.15, WARM))  # a graph of fewer operations has one cycle
SHORT_SEARCH_S = 1.0  # in less time a warm sequence alone is better
POOR = 1.5  # costs of every operation once, from which on a plan by eviction is a poor one
# In scope free: of the time or moves, for orders alone, and for sequences from them. There the temperature follows the
# time alone.
ORDER_SHARE, FREE_SHARE, ENDLESS = 0.3, 0.35, 1 << 60
SEED_STEP = 104_729  # between the seeds of cycles
DEADLINE_MARGIN_S = 0.05  # for the last simulation
ONLINE_FIRST = 2000  # operations: in a larger graph greedy eviction takes longer than loading the compiled online one
Stages = Callable[
    [np.ndarray | None, float, int], Best
]  # anneals intervals: (computations to start from, deadline, seed)
COLD = "the search is not compiled yet: run 'python -m remat.search' once (1 to 4 minutes)"


@strategy("search", implementations="search", begins_greedily=True, copies="annealed", version=4)
def search(problem: Problem, context: Context) -> Outcome:
    """Annealing from a greedy eviction, of retention intervals and of sequences of computations in turn.

    A move of intervals drops a value, holds it, or moves a repeat (`remat.search.kernel`). A move of sequences puts or
    takes single computations, as FastSA's (`remat.search.sequence`); it pays on graphs of `SMALL` operations and more.
    There sequences begin from the plan by eviction, unless that is poor (`first_heat`).

    If greedy eviction finds no plan, it starts from the cheapest baseline that fits, if any. On a large graph whose
    blocks repeat, it starts from the cheapest chain of plans of one block (`remat.search.chain`), if that is better.

    Anytime and seeded; independent seeds on `threads` threads share the best plan between rounds.
    With `work_limit` (moves of each thread, of intervals alone) they share nothing, and a run repeats exactly, unless
    `Solution.cut_by_clock` says that the time ended before the moves. All plans are staged and
    use exact accounting; nothing is proven.
    """
    graph = context.problem.graph
    if not is_ready():  # offer a plan before a minute of compiling
        for plan in greedy_plans(graph, context.problem.budget_bytes, deadline=time.monotonic() + SHORT_S):
            context.offer(plan, "search")
        if context.incumbent.plan is None and not context.repeats:
            lean_plan(context)
        if not ready_by(context.deadline):
            cut = True if context.repeats else None
            return Outcome(message=f"only greedy eviction ran: {COLD}", cut_by_clock=cut)
    if context.options.deterministic and context.options.work_limit is None:
        context = context.with_options(work_limit=fixed_moves(context))
    best = search_staged(context, context.options.threads, is_alone=True)
    stats, cut, limit = {"moves": best.moves}, None, context.options.work_limit
    if limit is not None:
        cut = not context.is_solved() and best.moves < limit * context.options.threads
    if context.is_solved():
        return Outcome(stats=stats, cut_by_clock=cut)  # a plan that was offered is optimal
    plan = best.plan(graph, context.problem.budget_bytes)
    if plan is None:
        message = f"no plan found after {best.moves:,} moves; nothing is proven"
        return Outcome(message=message, timed_out=cut is not False, stats=stats, cut_by_clock=cut)
    return Outcome((Candidate(plan, {"seed": context.options.seed}),), stats=stats, cut_by_clock=cut)


def search_staged(
    context: Context, threads: int, *, should_stop: Callable[[], bool] = lambda: False,
    on_round: Callable[[np.ndarray, int], None] | None = None, is_alone: bool = False, hot: float | None = None,
) -> Best:  # fmt: skip
    """Greedy eviction, then annealing until the context's limits; offers each better plan at once.

    Args:
        on_round: gets the best plan of each round, see `Calls`.
        is_alone: nothing else looks for the plan of the smallest budget known where eviction finds none.
        hot: the first temperature of sequences, see `HOT`; by default as the first plan tells (`first_heat`). With WARM
            nothing begins anew, from blocks neither, because a search before has left the warm start.
    """
    graph = context.problem.graph
    if context.is_over():
        return Best()

    def offer(order: np.ndarray, _cost: int) -> None:
        context.offer(Plan.from_order(graph, order.tolist(), context.problem.budget_bytes), "search")

    def adopt() -> tuple[np.ndarray, int] | None:
        known = context.incumbent.snapshot()
        if context.options.work_limit is not None or known is None or known[0].scope is not Scope.STAGED:
            return None  # a run that repeats exactly takes no plans of others
        return known[0].order, known[1]

    evicted = _evicted(context)
    if hot is None:
        hot = first_heat(graph, None if evicted is None else simulate(graph, evicted).cost)
    start = _order(evicted or _cheapest_of_families(context))
    if start is None and is_alone and not context.repeats:
        least = lean_plan(context)
        fits = least.bytes <= context.problem.budget_bytes and least.plan.scope is Scope.STAGED
        start = least.plan.order if fits else None
    if start is not None:
        offer(start, 0)
    cheaper = None if hot == WARM else _cheaper_by_blocks(context, start, threads)
    if cheaper is not None:
        start, hot = cheaper, WARM  # more heat would break up what the blocks have in common
        offer(start, 0)

    calls = Calls(offer, lambda: should_stop() or context.is_solved(), adopt, on_round)

    def stages(begin: np.ndarray | None, deadline: float, seed: int) -> Best:
        return minimise_cost(
            graph, context.problem.budget_bytes, begin, seed=seed, threads=threads, deadline=deadline,
            work_limit=context.options.work_limit, target_cost=graph.total_cost, calls=calls,
        )  # fmt: skip

    deadline = context.deadline - DEADLINE_MARGIN_S
    if context.repeats:
        return stages(start, deadline, context.options.seed)
    return _Cycles(context, threads, offer, calls.should_stop).run(start, deadline, hot, stages)


def first_heat(graph: Graph, cost: int | None) -> float:
    """With which temperature sequences begin where a plan by eviction has this cost; None without one that fits."""
    return HOT if cost is None or cost > POOR * graph.total_cost else MEDIUM


def search_free(context: Context, threads: int, *, should_stop: Callable[[], bool] = lambda: False) -> Best:
    """Orders for little memory, then sequences from each of them, then from the best plan; offers better plans.

    On graphs of `SMALL` operations and more, sequences begin from the best order only: a short cooling finds less. An
    order that fits without repeats is optimal in every scope.
    """
    graph, budget_bytes, options = context.problem.graph, context.problem.budget_bytes, context.options
    deadline, moves, known = context.deadline - DEADLINE_MARGIN_S, options.work_limit, context.incumbent.plan
    threads = threads if moves is None else 1  # a run that repeats exactly

    def offer(order: np.ndarray, _cost: int) -> None:
        context.offer(Plan.from_order(graph, order.tolist(), budget_bytes), "search over orders")

    def part(share: float, rest: float) -> tuple[float, int | None]:
        """(end, moves) of a step that has a share of all, after which that share of all is left."""
        left = deadline - time.monotonic()
        return (deadline - left * rest / (share + rest), None) if moves is None else (deadline, int(share * moves))

    found = _Cycles(context, threads, offer, lambda: should_stop() or context.is_solved())
    if known is not None and not context.repeats:
        found.take(known.order)
    until, most = part(ORDER_SHARE, 1 - ORDER_SHARE)
    orders = anneal_orders(graph, budget_bytes, options.seed, until, most, should_stop=found.should_stop)
    if orders[0].peak_bytes <= budget_bytes:
        found.best.offer(np.array(orders[0].operations, dtype=np.int32), graph.total_cost, 0)
        offer(np.array(orders[0].operations), graph.total_cost)
        return found.best
    orders = orders if len(graph) < SMALL else orders[:1]
    share = FREE_SHARE / len(orders)
    for i, order in enumerate(orders):
        until, most = part(share, 1 - ORDER_SHARE - (i + 1) * share)
        found.sequences(np.array(order.operations), HOT, until, options.seed + i, rule=FREE, moves=most)
    until, most = part(1 - ORDER_SHARE - FREE_SHARE, 0.0)
    found.sequences(found.best.order, WARM, until, options.seed + len(orders), rule=FREE, moves=most)
    return found.best


@dataclass(slots=True)
class _Cycles:
    """Two annealers in turn, in cycles that double in length.

    A cycle anneals a sequence from every operation once or from the best plan, then intervals and sequences in turn
    from the best plan. Each annealer improves plans that the other cannot.
    """

    context: Context
    threads: int
    offer: Callable[[np.ndarray, int], None]
    should_stop: Callable[[], bool]
    best: Best = field(default_factory=Best)

    def run(self, start: np.ndarray | None, deadline: float, hot: float, stages: Stages) -> Best:
        """The best plan; it fits if its `excess` is 0. The first sequence of a cycle begins `hot`."""
        seconds, is_small = deadline - time.monotonic(), len(self.graph) < SMALL
        if is_small or hot == HOT:
            steps = SMALL_CYCLE if is_small else HOT_CYCLE
        else:
            steps = ((0.4, hot), *AFTER) if seconds >= SHORT_SEARCH_S else ((1.0, WARM),)
        n = 1 if is_small else max(1, round(math.log2(1 + max(0.0, seconds) / FIRST_CYCLE_S)))
        if start is not None:
            self.take(start)
        index = 0
        while (began := time.monotonic()) < deadline and not self.should_stop():
            share = 1 / (2 ** (n - index) - 1) if index < n else 1.0
            seed = self.context.options.seed + SEED_STEP * index
            self._cycle(start, steps, began + share * (deadline - began), seed, stages)
            index += 1
        return self.best

    def _cycle(
        self, start: np.ndarray | None, steps: Sequence[tuple[float, float]], deadline: float, seed: int,
        stages: Stages,
    ) -> None:  # fmt: skip
        """One cycle, whose steps have their shares of the time until the deadline."""
        began, whole, done = time.monotonic(), sum(share for share, _ in steps), 0.0
        for i, (share, hot) in enumerate(steps):
            done += share
            ends = began + done / whole * (deadline - began)
            if hot == INTERVALS:
                found = stages(start if self.best.order is None else self.best.order, ends, seed + i)
                self.best.moves += found.moves
                if found.order is not None:
                    self.best.offer(found.order, found.cost, found.excess)
            else:
                self.sequences(None if hot == HOT else self.best.order, hot, ends, seed + i)

    def take(self, order: np.ndarray) -> None:
        """Take a plan as the best one, if it is."""
        trace = simulate(self.graph, Plan.from_order(self.graph, order.tolist()))
        self.best.offer(order, trace.cost, max(0, trace.peak_bytes - self.context.problem.budget_bytes))

    def sequences(
        self, start: np.ndarray | None, hot: float, deadline: float, seed: int, *, rule: int = STAGED,
        moves: int | None = None,
    ) -> None:  # fmt: skip
        """Anneal one sequence on each thread, from a plan or from every operation once.

        Args:
            moves: of a run that repeats exactly; the temperature then follows them alone.
        """
        graph, reporter = self.graph, Reporter(self.best, self.graph.total_cost, self.offer)

        def better(order: list[int]) -> None:
            cost = sum(graph.operations[k].cost for k in order)
            if self.best.offer(np.array(order, dtype=np.int32), cost, 0):
                reporter.report()

        def work(thread: int) -> None:
            sequencer = Sequencer(graph, self.context.problem.budget_bytes, rule, seed * 1009 + thread)
            if start is None or sequencer.load(start):
                known = self.best.cost if not self.best.excess else NOTHING
                found = sequencer.cool(
                    moves or (MOVES * len(graph) if rule == STAGED else ENDLESS), hot, deadline, stop,
                    is_counted=moves is not None, known=known, on_better=better,
                )  # fmt: skip
                with self.best.lock:
                    self.best.moves += found.moves

        def stop() -> bool:
            return reporter.is_stopped() or self.should_stop()

        try:
            on_threads(work, self.threads, reporter.stopped)
        finally:  # after Ctrl-C too, the best plan counts
            reporter.report(last=True)

    @property
    def graph(self) -> Graph:
        """Of the problem."""
        return self.context.problem.graph


def evict(context: Context) -> None:
    """Offer plans by eviction, because a warm start for a smaller budget may be far worse.

    Greedy eviction takes milliseconds on most graphs, and loading the compiled online one takes half a second in a
    new process. On a large graph it is the other way round.
    """
    is_large = len(context.problem.graph) >= ONLINE_FIRST
    if not (is_large and _evict_online(context)):
        evict_greedily(context)
        if not is_large and not context.is_solved():
            _evict_online(context)


def evict_greedily(context: Context) -> None:
    """Offer the plans of greedy eviction, even if no time is left."""
    problem = context.problem
    for plan in greedy_plans(problem.graph, problem.budget_bytes, deadline=time.monotonic() + SHORT_S):
        context.offer(plan, "greedy eviction")


def _evict_online(context: Context) -> bool:
    """Offer the plan of an online run; whether it is the best so far."""
    problem = context.problem
    plan = online_plan(problem.graph, problem.budget_bytes, context.is_over) if is_ready() else None
    return plan is not None and context.offer(plan, "online eviction")


def quick_plan(context: Context) -> Plan | None:
    """A plan that fits, for others to start from, by greedy eviction and a short annealing; None if none is found."""
    graph = context.problem.graph
    if not is_ready():
        return greedy_eviction(graph, context.problem.budget_bytes, deadline=context.deadline)
    best = minimise_cost(
        graph, context.problem.budget_bytes, first_order(context), seed=context.options.seed, work_limit=QUICK_MOVES,
        deadline=context.share_ends(QUICK_SHARE), target_cost=graph.total_cost,
    )  # fmt: skip
    return best.plan(graph, context.problem.budget_bytes)


def fixed_moves(context: Context) -> int:
    """Moves of each thread in a run that repeats exactly: the work limit, or a number that the time limit gives."""
    return context.options.work_limit or context.steps_in(MOVES_PER_S * min(1.0, 400 / len(context.problem.graph)))


def first_order(context: Context) -> np.ndarray | None:
    """Computations of a staged plan to start from: the warm start, the cheapest of fast evictions, or of baselines.

    None if there is none.
    """
    return _order(_evicted(context) or _cheapest_of_families(context))


def _order(plan: Plan | None) -> np.ndarray | None:
    return None if plan is None else plan.order


def _evicted(context: Context) -> Plan | None:
    """The warm start if it is staged, or the cheapest plan of fast evictions that fits; None if there is none."""
    warm = context.options.warm_start
    if warm is not None and warm.scope is Scope.STAGED:
        return warm
    graph, budget_bytes = context.problem.graph, context.problem.budget_bytes
    most_s = SHORT_S if context.options.work_limit is None else math.inf  # a run that repeats tries all
    starts = [
        *greedy_plans(graph, budget_bytes, deadline=context.deadline, most_s=most_s),
        online_plan(graph, budget_bytes, context.is_over),
    ]
    return _cheapest(context.problem, filter(None, starts))


def _cheapest_of_families(context: Context) -> Plan | None:
    """The cheapest plan of the baselines that fits; None if there is none."""
    plans = family_plans(context, context.share_ends(FAMILY_SHARE))
    return _cheapest(context.problem, (plan for _, plan in plans))


def lean_plan(context: Context) -> MinBudget:
    """The smallest budget that is known in a share of the time; its plan is offered if it fits."""
    left_s = context.remaining_s()
    seconds = min(LEAN_S, max(LEAST_LEAN_S, LEAN_SHARE * left_s), MOST_LEAN * left_s)
    least = min_budget(context.problem.graph, str(context.problem.scope), time_limit_s=seconds)
    if least.bytes <= context.problem.budget_bytes:
        context.offer(least.plan, "min_budget")
    return least


def _cheapest(problem: Problem, plans: Iterable[Plan]) -> Plan | None:
    """The cheapest staged plan that fits, the first one of equals; None if none does."""
    best: tuple[int, Plan] | None = None
    for plan in plans:
        trace = simulate(problem.graph, plan)
        fits = plan.scope is Scope.STAGED and trace.peak_bytes <= problem.budget_bytes
        if fits and (best is None or trace.cost < best[0]):
            best = trace.cost, plan
    return None if best is None else best[1]


def _cheaper_by_blocks(context: Context, start: np.ndarray | None, threads: int) -> np.ndarray | None:
    """Computations of a plan whose blocks follow plans of one block, if it is cheaper than `start`.

    None on small graphs, and in a run that repeats.
    """
    graph, budget_bytes = context.problem.graph, context.problem.budget_bytes
    if len(graph) < LARGE or context.repeats or context.is_solved():
        return None
    plan = chain_plan(
        graph, budget_bytes, seed=context.options.seed, threads=threads, deadline=context.share_ends(BLOCKS_SHARE)
    )
    if plan is None:
        return None
    if start is not None:
        first = simulate(graph, Plan.from_order(graph, start.tolist()))
        if first.peak_bytes <= budget_bytes and first.cost <= simulate(graph, plan).cost:
            return None
    return plan.order


def start_plans(context: Context) -> Iterator[tuple[str, Plan]]:
    """(strategy name, plan) of each plan of the strategies that give starts, also of those beyond the budget.

    A strategy that would be compiled first is left out, because nothing could interrupt that.
    """
    for chosen in map(get_strategy, strategies()):
        if chosen.gives_starts and (chosen.compiles is None or is_compiled(chosen.compiles)):
            for plan in _plans(chosen, context):
                yield chosen.name, plan


def family_plans(context: Context, until: float) -> Iterator[tuple[str, Plan]]:
    """(strategy name, plan) of the strategies that ignore the budget, until the time `until` (`time.monotonic`).

    Plans beyond the budget are among them.
    """
    chosen = [each for each in map(get_strategy, strategies()) if each.ignores_budget and not each.isolated]
    return in_turns(chosen, context.until(until))


def in_turns(chosen: Iterable[Strategy], context: Context) -> Iterator[tuple[str, Plan]]:
    """(strategy name, plan) of strategies that take turns, so that many plans of one do not delay another's."""
    waiting = [(each.name, _plans(each, context)) for each in chosen]
    while waiting:
        for entry in list(waiting):
            if context.is_over():
                return
            plan = next(entry[1], None)
            if plan is None:
                waiting.remove(entry)
            else:
                yield entry[0], plan


def _plans(chosen: Strategy, context: Context) -> Iterator[Plan]:
    try:
        for candidate in candidates_of(chosen(context, {})):
            yield candidate.plan
    except Skip:
        pass  # the strategy does not apply to this graph
