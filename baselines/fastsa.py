"""FastSA: simulated annealing of the sequence of computations, with the peak in a segment tree."""

from __future__ import annotations

import time

from remat import Candidate, Plan, Problem, Scope, Skip, strategy
from remat.compiled import is_compiled
from remat.context import Context
from remat.search.sequence import FIXED, FREE, STAGED, Cooled, Sequencer, anneal
from remat.solution import Outcome

ORDERS = ("fixed", "free")
MOVES = 5000  # per operation, in one annealing
MOVES_PER_S = 20_000  # in a deterministic run: the speed of a slow machine
ROUNDS = 3  # annealings, until a plan fits
HOT = 1.0  # the first temperature, in mean costs of an operation
LAST_S, LAST_SHARE = 0.05, 0.02  # of the time left, for the plan
COLD_START_S = 40.0  # compiling takes 20 s; it does not begin with less time than this


@strategy("fastsa", baseline=True, allowed={"order": ORDERS}, compiles=anneal)
def fastsa(problem: Problem, context: Context, *, order: str = "fixed") -> Outcome:
    """Annealing that puts, takes and shifts single computations (Imanishi et al., NeurIPS 2023).

    It minimises cost and a price on the bytes of the peak above the budget. A lazily updated segment tree holds the
    bytes at each place of the sequence, so that a move takes logarithmic time. It starts from every operation once.

    Deviations: its code is not public, and the choice of moves and the temperatures are ours: more than half of the
    moves free a value that is held at the peak. A move also puts what the new computation needs, or takes what only
    the old one needed. The price follows the share of moves that begin above the budget. Groups of operations, which
    shorten the sequence at first, are left out. A staged sequence has its repeats in the graph's order within a stage.

    Args:
        order: ``fixed`` keeps the graph's order of first computations; ``free`` moves them too, as the paper does, and
            needs ``scope=free``.

    @inproceedings{imanishi2023fast, title={A fast heuristic to optimize time-space tradeoff for large models},
    author={Imanishi, Akifumi and Xu, Zijian and Takagi, Masayuki and Wang, Sixue and Castillo, Emilio},
    booktitle={NeurIPS}, year={2023}}
    """
    moves_first = ORDERS.index(order) == 1
    if moves_first and problem.scope is not Scope.FREE:
        raise Skip("order=free moves first computations; ask for it with scope=free")
    if not is_compiled(anneal) and context.remaining_s() < COLD_START_S:
        needed = f"it is not compiled yet: give it {COLD_START_S:.0f} s once"
        return Outcome(message=needed, timed_out=True)
    rule = FREE if moves_first else STAGED if problem.scope is Scope.STAGED else FIXED
    sequencer = Sequencer(problem.graph, problem.budget_bytes, rule, context.options.seed)
    if sequencer.fits:
        return Outcome((Candidate(Plan.from_order(problem.graph, sequencer.order)),))
    found, moves = Cooled([], 0, False), 0
    for _ in range(ROUNDS):
        found = _annealed(sequencer, context)
        moves += found.moves
        if found.order or found.is_cut or context.is_solved():
            break
    plans = (Candidate(Plan.from_order(problem.graph, found.order), {"order": order}),) if found.order else ()
    return Outcome(plans, stats={"moves": moves}, cut_by_clock=found.is_cut if context.repeats else None)


def _annealed(sequencer: Sequencer, context: Context) -> Cooled:
    """One annealing. The temperature follows the moves or the time; in a repeatable run the moves alone."""
    moves = context.options.work_limit or MOVES * len(context.problem.graph)
    if context.options.deterministic:
        moves = min(moves, context.steps_in(MOVES_PER_S))
    ends = time.monotonic() + context.remaining_s() * (1 - LAST_SHARE) - LAST_S
    return sequencer.cool(moves, HOT, ends, context.is_solved, is_counted=context.repeats)
