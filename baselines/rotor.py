"""Rotor: the optimal persistent checkpoints of a chain of stages, by dynamic programming."""

from __future__ import annotations

from baselines._chain import SLOTS, Chain
from baselines._persistent import Schedules, schedule_table
from remat import Candidate, Plan, Problem, simulate, strategy
from remat.context import Context

MOST_STAGES = 200  # the program takes time in the cube of their number
TRIES = 6  # of smaller limits, until the simulator agrees


@strategy("rotor", baseline=True, allowed={"slots": SLOTS}, compiles=schedule_table)
def rotor(problem: Problem, context: Context, *, slots: int = 500) -> list[Candidate]:
    """The cheapest schedule whose checkpoints stay until they are used (Beaumont et al., 2019).

    Each stage of the chain runs forward without saving, or saves its input, or saves all that its backward pass reads.
    The program is exact on a chain whose bytes are multiples of a slot (`baselines._persistent`). As its authors do,
    another graph is taken as the sequence of what lies between its articulation points.

    Deviations: gradients of parameters count from where they are made. Of more than 200 articulation points those with
    most bytes are left out. The simulator frees each value at its last use, and judges; where values are read across
    stages, the program is asked again with a smaller limit.

    Args:
        slots: into which the memory is divided; their published setting is 500.

    @article{beaumont2019optimal, title={Optimal checkpointing for heterogeneous chains: how to train deep neural
    networks with limited memory}, author={Beaumont, Olivier and Eyraud-Dubois, Lionel and Herrmann, Julien and Joly,
    Alexis and Shilova, Alena}, journal={arXiv:1911.13214}, year={2019}}
    """
    chain = Chain.of(problem.graph, MOST_STAGES)
    stages = chain.stages()
    room = problem.budget_bytes - problem.graph.fixed_bytes
    for _ in range(TRIES):
        if room < 0 or context.remaining_s() <= 0:
            break
        unit = max(1, -(-room // slots))
        passes = Schedules(stages.in_slots(unit), room // unit).within(room // unit)
        if passes is None:
            break
        plan = Plan.from_order(problem.graph, chain.order(passes))
        excess = simulate(problem.graph, plan).peak_bytes - problem.budget_bytes
        if excess <= 0:
            return [Candidate(plan, {"stages": len(chain.forward)})]
        room -= max(excess, unit)
    return []
