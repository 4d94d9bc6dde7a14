"""The best checkpoints of a model within a budget, for those who cannot use our executor.

A language says what a plan may choose: blocks that run again (`torch.utils.checkpoint`), results of calls or operators
that they keep (selective activation checkpointing), regions that they save (torch_remat). An integer program chooses,
and bounds what the language can reach; the executor's own code, followed on tensors without contents, says what the
choice needs. So the promised peak is that of the checkpoints as they run.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from os import PathLike
from typing import Any

from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from remat.errors import InvalidInput, headline, shown, unknown_name
from remat.execution import StepPlan
from remat.files import write_text
from remat.graph import reached
from remat.torch.checkpointing.languages import LANGUAGES, Kept, Language, language_named
from remat.torch.checkpointing.program import Program, Steps
from remat.torch.checkpointing.runs import Changes, Region, Run, Savers, marked, marked_region, saving, saving_as
from remat.torch.following.module import Rematerialized
from remat.torch.internals.autograd import BatchNorm, places_of_children
from remat.torch.measuring.plain import FollowedStep, Follower, has_recurrent_layer, plain_step, real_step
from remat.torch.planning.capturing import captured_step, keywords, with_storages
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import START
from remat.torch.step.blocks import blocks_in_rows, blocks_of, forwards_replaced
from remat.torch.step.branches import describe_inputs
from remat.torch.step.refusals import check_sample_args
from remat.units import format_size

MOST_CHOICES = 12  # that are followed
ENOUGH = 0.01  # of the cost: the search ends when no plan of the language can cost this much less
SMALLER = 0.01  # of the budget: by so much the program gets less if it chooses again what does not fit


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of a model, as their executor runs them.

    Attributes:
        kept: [name of a module] (what is kept of one run of it, whether it draws random numbers); kept are results of
            calls by number, or of operators by name, or what modules inside of it save.
        peak_bytes: of a step, everything included that the plan of `rematerialize` counts.
        overhead: cost of the step over that of the plain step, minus 1.
        least_overhead: no plan of the language within the budget has less; proven by an integer program (HiGHS).
        free_overhead: the same of the module's plan, which our executor follows within the same budget.
    """

    name: str
    language: str
    kept: Kept
    budget_bytes: int
    peak_bytes: int
    overhead: float
    least_overhead: float
    free_overhead: float

    @property
    def gap(self) -> float:
        """(cost - least cost of the language) / cost."""
        return (self.overhead - self.least_overhead) / (1 + self.overhead)

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the checkpoints in `model`, in place; returns it."""
        return LANGUAGES[self.language].code.apply(model, self.kept)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a Python file for the executor; but for torchtitan's, its ``apply(model)`` makes the checkpoints."""
        write_text(path, LANGUAGES[self.language].file(str(self), self.kept))

    def __str__(self) -> str:
        n_kept = sum(len(kept) for kept, _ in self.kept.values())
        modules = f"{len(self.kept)} module{'s' * (len(self.kept) != 1)}"
        what = LANGUAGES[self.language].keeps
        within = f"; {'results' if what == 'calls' else what} kept in them: {n_kept}" if what else ""
        return (
            f"Checkpoints of '{self.name}': {modules}{within}.\n"
            f"Peak {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}, overhead {self.overhead:.1%}; "
            f"no plan of the language '{self.language}' has less than {self.least_overhead:.1%}; "
            f"the free plan's overhead is {self.free_overhead:.1%}."
        )


def checkpoints(
    module: Rematerialized,
    sample_args: tuple[Any, ...],
    *,
    sample_kwargs: Mapping[str, Any] | None = None,
    language: str = "selective",
    blocks: Sequence[str] | None = None,
) -> Checkpoints:
    """The cheapest checkpoints of a model's blocks within the budget of its plan.

    Args:
        module: of `rematerialize`, with ``backend="eager"``.
        sample_args: as those of `rematerialize`.
        sample_kwargs: as those of `rematerialize`.
        language: ``blocks`` keeps nothing within a checkpoint, ``selective`` keeps the results of some calls. For other
            executors: ``transformers`` (which layers; also axolotl), ``fsdp2`` (layers, and operators in each),
            ``torchtitan`` (operators, the same in every layer), ``torch_remat`` (blocks, and saved regions in each).
        blocks: names of the modules that may become checkpoints; by default those that stand in a row, or consist of
            layers only.

    Raises:
        InvalidInput: no such checkpoints fit the budget; the model has no blocks; an option is wrong.
    """
    if not issubclass(type(module), Rematerialized):  # isinstance asks the model's class
        raise InvalidInput("checkpoints takes the module that rematerialize returns")
    check_sample_args(sample_args)
    return _Search(module, sample_args, keywords(sample_kwargs), blocks, language_named(language)).best()


class _Search:
    """Choices of checkpoints for one step, and what PyTorch makes of them."""

    def __init__(
        self, module: Rematerialized, args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: Sequence[str] | None,
        language: Language,
    ):  # fmt: skip
        self.model, planner, self.language = module.model, module._planner, language
        if not isinstance(module.plan, StepPlan):
            raise InvalidInput("checkpoints are not for a model that is planned in parts")
        if not isinstance(planner.backend, Eager):
            raise InvalidInput("checkpoints are of eager steps: rematerialize with backend='eager'")
        if has_recurrent_layer(self.model):
            raise InvalidInput("the model has a recurrent layer, whose memory is known only from a step that runs")
        self.blocks = self._checked(blocks)
        self.args, self.kwargs = with_storages((args, kwargs), planner.device)
        step = captured_step(self.model, self.args, self.kwargs, Eager(planner.backend.implementations))
        self.planner, inputs = planner, describe_inputs((self.args, self.kwargs))
        own = planner.surrounded(step, inputs)
        self.fixed_bytes = own.graph.fixed_bytes - own.fixed[START]  # a followed step makes it
        self.free = planner.plan(step, inputs)
        self.graph, self.weights = step.graph, dict[str, tuple[int, int]]()
        self.steps = self._steps(blocks)

    def _steps(self, given: Sequence[str] | None) -> Steps:
        plain, plain_runs = self._followed(marked)
        if self._leave_out({run.block for run in plain_runs if run.changes_input}, given):
            plain, plain_runs = self._followed(marked)
        try:
            with set_checkpoint_early_stop(self.language.stops_early):
                every, runs = self._followed(partial(marked, wraps=True))
        except RuntimeError as error:
            text = headline(error, 160)
            raise InvalidInput(f"the blocks cannot run again ({text}): leave the cause out of blocks=") from error
        steps = Steps(plain, every, plain_runs, runs, self.weights, self._dying())
        if self.language.keeps == "regions":
            step, regions = self._followed(marked, regions=True)
            steps = replace(steps, marked=step, regions=regions)
        self._weigh({*plain.signatures, *every.signatures, *(steps.marked.signatures if steps.marked else ())})
        return steps

    def _checked(self, blocks: Sequence[str] | None) -> list[str]:
        known = dict(self.model.named_modules())
        if isinstance(blocks, str) or not isinstance(blocks, (Sequence, type(None))):
            raise InvalidInput(f"blocks must be a list of names of modules, not {shown(blocks)}")
        names = self._default_blocks() if blocks is None else list(blocks)
        for name in names:
            if not isinstance(name, str) or name not in known or not name:
                raise unknown_name("block", name, [other for other in known if other])
            if any(name.startswith(f"{other}.") for other in names):
                raise InvalidInput(f"the block '{name}' is inside of another; give either")
            self._check_executor(name, known[name])
        if not names:
            raise InvalidInput("no block was found in the model: give blocks=[names of modules], see named_modules()")
        return list(dict.fromkeys(names))

    def _default_blocks(self) -> list[str]:
        if self.language.is_alike:
            return [*blocks_in_rows(self.model)]
        if not self.language.layers:
            return [*blocks_of(self.model)]
        found = [name for name, x in self.model.named_modules() if self._is_layer(x)]
        if not found:
            raise InvalidInput(f"language='{self.language.name}' is for models of transformers, whose layers it knows")
        return found

    def _is_layer(self, module: nn.Module) -> bool:
        return any(kind.__name__ == self.language.layers for kind in type(module).__mro__)

    def _check_executor(self, name: str, block: nn.Module) -> None:
        """Whether the language's executor can make a checkpoint of the block."""
        if self.language.layers and not self._is_layer(block):
            raise InvalidInput(f"the block '{name}' is no layer that transformers can make a checkpoint of")
        if self.language.is_alike and sum(x is block for _, _, x in places_of_children(self.model)) > 1:
            raise InvalidInput(
                f"the model has the block '{name}' in several places; language='{self.language.name}' would make a "
                "checkpoint of it in one: take 'fsdp2', or leave it out of blocks="
            )
        norms = (part for part in block.modules() if isinstance(part, BatchNorm) and part.track_running_stats)
        if not self.language.keeps_statistics and any(part.training for part in norms):
            raise InvalidInput(
                f"the block '{name}' has a batch norm, whose statistics language='{self.language.name}' would move "
                "twice: take 'blocks' or 'selective', or leave it out of blocks="
            )

    def _leave_out(self, changing: set[str], given: Sequence[str] | None) -> bool:
        """Leave out blocks that change their inputs in place, and cannot run again; returns whether there are any."""
        if changing and given is not None:
            raise InvalidInput(f"the block '{min(changing)}' changes its input in place: leave it out of blocks=")
        self.blocks = [name for name in self.blocks if name not in changing]
        if not self.blocks:
            raise InvalidInput("every block changes its input in place: give blocks=[names of other modules]")
        return bool(changing)

    def best(self) -> Checkpoints:
        """The cheapest choice that fits."""
        budget = self.planner.budget_bytes - self.fixed_bytes
        tried, least = self._tried(Program(self.steps, self.language), budget)
        fitting = {choice: found for choice, found in tried.items() if found[0] <= budget}
        if not fitting:
            needs = min(peak for peak, _ in tried.values()) + self.fixed_bytes
            raise InvalidInput(
                f"no checkpoints of {len(self.blocks)} blocks fit {format_size(self.planner.budget_bytes)}: the step "
                f"needs {format_size(needs)} with them; give a larger budget, or smaller blocks=[names of modules]"
            )
        choice, (peak, cost) = min(fitting.items(), key=lambda item: (item[1][1], len(item[0])))
        plain = self.steps.cost(self.steps.plain.signatures)
        return Checkpoints(
            self.planner.name, self.language.name, dict(choice), self.planner.budget_bytes, self.fixed_bytes + peak,
            cost / plain - 1, float(min(cost / plain - 1, max(0.0, least) / plain)), self.free.overhead,
        )  # fmt: skip

    def _tried(self, program: Program, budget: int) -> tuple[dict[tuple[Any, ...], tuple[int, int]], float]:
        """([choice] (peak, cost), followed; a bound on the cost of any choice that fits, above the plain step's).

        The program asks for less than PyTorch needs. So what does not fit is excluded, and the next choice aims lower.
        """
        nothing = program.nothing_kept()
        tried, least, aim = {tuple(nothing.items()): self._judged(nothing, program)}, -inf, budget
        plain = self.steps.cost(self.steps.plain.signatures)
        for _ in range(MOST_CHOICES):
            best = min((cost for peak, cost in tried.values() if peak <= budget), default=inf)
            if best - plain - least <= ENOUGH * best:
                break
            kept, bound = program.cheapest(aim)
            least = max(least, bound) if aim == budget else least
            if kept is None and aim == budget:
                break
            if kept is None:
                aim = budget
                continue
            choice = tuple(kept.items())
            tried[choice] = tried.get(choice) or self._judged(kept, program)
            if (missed := tried[choice][0] - budget) > 0:
                program.exclude(kept)
                aim -= max(missed, round(SMALLER * budget))
            else:
                aim = budget
        return tried, least

    def _judged(self, kept: Kept, program: Program) -> tuple[int, int]:
        """(peak, cost) of a step with these checkpoints, followed through the executor's own code."""
        silent = {name: (what, False) for name, (what, _) in kept.items()}  # no random state on such tensors
        undo, model = self.language.undoes, self.model
        if undo is None:
            tensors = (*model.parameters(), *model.buffers())
            model = copy.deepcopy(model, {id(x): x for x in tensors})
        self.language.code.apply(model, silent)
        try:
            step = self._step(model)
        except RuntimeError as error:
            raise InvalidInput(
                f"language='{self.language.name}': its executor cannot run the blocks ({headline(error, 160)}): leave "
                "the cause out of blocks="
            ) from error
        finally:
            if undo is not None:
                undo(model)
        self._weigh(set(step.signatures))
        return int(self.steps.totals(step).max()) + program.states_of(kept), self.steps.cost(step.signatures)

    def _step(self, model: nn.Module) -> FollowedStep:
        if self.language.is_real:
            return real_step(model, self.args, self.kwargs, self.planner.outside, lambda _: None, self.planner.device)
        return plain_step(model, self.args, self.kwargs, self.planner.outside)

    def _weigh(self, signatures: set[str]) -> None:
        new = signatures - self.weights.keys() - {""}
        if new:
            self.weights |= self.planner.weigh_calls(new, self.graph)

    def _dying(self) -> list[int]:
        """[run] bytes that it returns, and that nothing but itself saves: a checkpoint may leave them to nobody."""
        savers = Savers()
        try:
            _, runs = self._followed(partial(saving, savers=savers), outside=savers)
        except RuntimeError:  # hooks on saved tensors cannot be where torch.func is
            savers, (_, runs) = {}, self._followed(partial(saving, savers=savers))
        return [
            sum(n for key, n in run.made.items() if not savers or savers.get(key) == {i}) for i, run in enumerate(runs)
        ]

    def _followed(
        self, wrap: Callable[..., Any], regions: bool = False, outside: Savers | None = None
    ) -> tuple[FollowedStep, list[Run]]:
        """A step with `wrap` around every block, and the runs of blocks in it.

        Args:
            regions: note what modules in blocks save.
            outside: note what is saved outside of blocks.
        """
        runs, followers, inside = list[Run](), list[Follower](), list[Region]()

        def start(follower: Follower) -> None:
            runs.clear()
            followers[:] = [follower]

        blocks = {name: self.model.get_submodule(name) for name in self.blocks}
        wrapped = {name: wrap(block.forward, name, runs, followers) for name, block in blocks.items()}
        for name, part in self._parts() if regions else ():
            wrapped[name] = marked_region(part.forward, name, runs, followers, inside)
        if outside is not None:
            wrapped[""] = saving_as(self.model.forward, -1, outside)
        with forwards_replaced(self.model, wrapped):
            seen = Changes(runs, inside) if regions else None
            step = plain_step(self.model, self.args, self.kwargs, self.planner.outside, start, seen)
        return step, runs

    def _parts(self) -> list[tuple[str, nn.Module]]:
        """Names and modules within one block that are nowhere else in the model: a region is one in every place."""
        blocks = {name: self.model.get_submodule(name) for name in self.blocks}
        roots = {*blocks.values()}
        outside = reached([self.model], lambda x: () if x in roots else x.children())
        uses = Counter(part for block in blocks.values() for part in block.modules())
        uses.update(outside.keys() - roots)
        return [
            (f"{name}.{own}", part) for name, block in blocks.items() for own, part in block.named_modules()
            if own and uses[part] == 1
        ]  # fmt: skip
