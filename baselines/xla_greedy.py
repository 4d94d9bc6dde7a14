"""XLA's rematerialization pass: where memory exceeds the limit, repeat or move what saves most."""

from __future__ import annotations

from baselines._program_points import advance, walk
from remat import Candidate, Plan, Problem, simulate, strategy
from remat.context import Context
from remat.plan import Scope
from remat.registry import POSITIVE
from remat.search.online import in_stages

TRIES = 6  # of smaller limits, until the simulator agrees


@strategy("xla_greedy", baseline=True, allowed={"block_size": POSITIVE, "block_factor": POSITIVE}, compiles=advance)
def xla_greedy(problem: Problem, context: Context, *, block_size: int = 32, block_factor: int = 10) -> list[Candidate]:
    """XLA's greedy pass: at an operation over the limit, put off the block that frees most bytes.

    The pass (class HloRematerialization in OpenXLA's ``hlo_rematerialization.cc``) walks over the scheduled sequence
    and counts what is live. While an operation is over the limit, it takes the earlier run of the least cost, which is
    limit // (bytes that go - bytes of dead inputs that have to stay); the time of a repeat does not count. All reads
    to come then read a repeat, placed before the first of them and before the next reads of its own inputs. A run that
    nobody has read is moved, at cost 0, and twice at most. If no single run helps, blocks of consecutive runs are
    looked at, of twice the size each time.

    Deviations: no compression, no offloading, no called computations. A kept value counts from where it is made, not
    always, and workspaces count. Operations move only where the scope lets them run in another order. In a staged plan
    what runs again between two first runs is sorted. The walk ends where nothing helps, because the plan would not fit,
    and at 4 runs for each operation. XLA does not look back at operations before which a dead input now stays; if the
    simulator finds the limit exceeded, the walk begins anew with a smaller one.

    Args:
        block_size: most runs of a block. XLA's compiler for GPUs sets 1; a larger limit changes nothing until 1 fails.
        block_factor: the effort for blocks, as a multiple of that for single runs. XLA's compiler for GPUs sets 1.

    @misc{openxla, title={{XLA}: machine learning compiler}, author={{The OpenXLA Authors}},
    howpublished={https://github.com/openxla/xla}, year={2017}}
    """
    graph, is_free = problem.graph, problem.scope is Scope.FREE
    room = problem.budget_bytes - graph.fixed_bytes
    for _ in range(TRIES):
        order = walk(graph, room, block_size, block_factor, is_free, lambda: context.remaining_s() > 0)
        if order is None:
            break
        plan = Plan.from_order(graph, in_stages(order) if problem.scope is Scope.STAGED else order)
        excess = simulate(graph, plan).peak_bytes - problem.budget_bytes
        if excess <= 0:
            return [Candidate(plan, {"block_size": block_size})]
        room -= excess
    return []
