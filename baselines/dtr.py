"""Dynamic Tensor Rematerialization: evict online, by a heuristic, and compute again what is missing."""

from __future__ import annotations

from remat import Candidate, Plan, Problem, strategy
from remat.context import Context
from remat.search.online import NAMES, evict_online, run_online
from remat.solution import Outcome

MOST = 20  # computations for each operation: the run thrashes


@strategy("dtr", baseline=True, allowed={"heuristic": NAMES}, version=1, compiles=evict_online)
def dtr(problem: Problem, context: Context, *, heuristic: str = "exact", seed: int = 0) -> Outcome:
    """The run of an online method that sees one operation at a time (Kirisame et al., ICLR 2021).

    When memory is short it evicts the resident value with the least h = c / (bytes x staleness). c is the cost of the
    value's operation and of the evicted ones around it, which would have to run with it. The program's own frees are
    given; what it has freed comes back only for as long as it is read.

    Deviations: a value is a storage with all its aliases; frees within the plan are at the last use, which an online
    method does not know, so that the plan's peak is at most the run's. What has to run once is never evicted, nor what
    can no longer be made again because such an input is freed.

    Args:
        heuristic: ``exact`` (evicted ancestors and descendants), ``union_find`` (the published approximation by sets
            that are never split), ``local`` (the value's own cost), or the ablations ``lru``, ``size``, ``random``.
        seed: of ``random``.

    @inproceedings{kirisame2021dynamic, title={Dynamic Tensor Rematerialization}, author={Kirisame, Marisa and
    Lyubomirsky, Steven and Haan, Altan and Brennan, Jennifer and He, Mike and Roesch, Jared and Chen, Tianqi and
    Tatlock, Zachary}, booktitle={ICLR}, year={2021}}
    """
    graph = problem.graph
    run = run_online(
        graph, problem.budget_bytes, heuristic, seed, MOST * len(graph), lambda: context.remaining_s() <= 0
    )
    if run.failed_at >= 0:
        return Outcome(timed_out=run.is_stopped)
    return Outcome((Candidate(Plan.from_order(graph, run.order.tolist()), {"heuristic": heuristic}),))
