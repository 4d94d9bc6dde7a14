"""``python -m remat.search``: compile the search now, so that the first solve does not have to."""

from __future__ import annotations

import subprocess
import sys
import time

from remat import child
from remat.arena import compile_places
from remat.compiled import is_compiled
from remat.context import Context
from remat.frontends.synthetic import chain
from remat.problem import Problem, SolveOptions
from remat.registry import get_strategy, strategies
from remat.search.anneal import COMPILED_ON, compile_annealing
from remat.search.joint import compile_joint
from remat.search.offload import compile_offload
from remat.search.online import online_plan
from remat.search.ordering.anneal import anneal_orders
from remat.search.sequence import STAGED, Sequencer
from remat.simulator import plain_peak
from remat.solution import candidates_of

OTHERS = "others"  # argument of the second process


def main() -> None:
    """Compile everything that `search` and `portfolio` use, in two processes, and keep it in the cache."""
    if OTHERS in sys.argv:
        compile_others()
        return
    began = time.monotonic()
    beside = subprocess.Popen(child.command("remat.search", OTHERS), env=child.environment({}))
    compile_search()
    if beside.wait():
        compile_others()
    print(f"the search is compiled ({time.monotonic() - began:.0f} s)")


def compile_search() -> None:
    """What a solve of an ordinary graph uses."""
    compile_annealing()
    anneal_orders(COMPILED_ON, 6, work_limit=100)
    online_plan(COMPILED_ON, 6)
    Sequencer(COMPILED_ON, 6, STAGED, 0).cool(100, 1.0, time.monotonic() + 1, lambda: False)


def compile_others() -> None:
    """Other strategies that give starts; places, implementations, copies."""
    problem = Problem(chain(n=6), plain_peak(chain(n=6)) - 1)
    for chosen in map(get_strategy, strategies()):
        if chosen.gives_starts and chosen.compiles is not None and not is_compiled(chosen.compiles):
            list(candidates_of(chosen(Context.of(problem, SolveOptions()), {})))
    compile_places()
    compile_joint()
    compile_offload()


if __name__ == "__main__":
    main()
