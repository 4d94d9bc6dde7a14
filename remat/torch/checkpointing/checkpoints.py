"""The best checkpoints of a model within a budget, for those who cannot use our executor.

Two languages. ``blocks``: a set of modules, each of which runs again before its backward pass
(`torch.utils.checkpoint`). ``selective``: within each such module the results of some calls are kept (selective
activation checkpointing). A small integer program chooses; PyTorch's own code, followed on tensors without contents,
says what the choice needs. So the promised peak is that of the checkpoints as PyTorch runs them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from remat.errors import InvalidInput, headline, unknown_name
from remat.execution import StepPlan
from remat.files import write_text
from remat.torch._random import random_state
from remat.torch.checkpointing import checkpointed
from remat.torch.checkpointing.checkpointed import casting_anew
from remat.torch.following.module import Rematerialized
from remat.torch.internals.autograd import NOT_IN_POLICIES, storage_key
from remat.torch.internals.operators import TorchDispatchMode, schema_of
from remat.torch.measuring.plain import FollowedStep, Follower, has_recurrent_layer, plain_step
from remat.torch.planning.capturing import captured_step, describe_inputs, keywords, with_storages
from remat.torch.planning.eager import Eager
from remat.torch.planning.planner import START
from remat.torch.step.blocks import blocks_of, forwards_replaced
from remat.torch.step.work import call_signature, storage_bytes, tensors_of
from remat.units import format_size

LANGUAGES = ("blocks", "selective")
MOST_CHOICES = 12  # that are followed
SEARCH_S = 10.0  # of the integer program
SMALLER = 0.01  # of the budget: by so much the program gets less if it chooses again what does not fit
TIE = 1e-6  # of the largest cost, per block: of choices that cost the same, the one with fewer blocks


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Checkpoints of a model, as PyTorch runs them.

    Attributes:
        kept: [name of a module] (numbers of the calls in one run of it whose results are kept, whether it draws).
        peak_bytes: of a step, everything included that the plan of `rematerialize` counts.
        overhead: cost of the step over that of the plain step, minus 1.
        free_overhead: the same of the module's plan, which our executor follows within the same budget.
    """

    name: str
    language: str
    kept: Mapping[str, tuple[tuple[int, ...], bool]]
    budget_bytes: int
    peak_bytes: int
    overhead: float
    free_overhead: float

    def apply(self, model: nn.Module) -> nn.Module:
        """Make the checkpoints in `model`, in place; returns it."""
        return checkpointed.apply(model, self.kept)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a Python file whose ``apply(model)`` makes the checkpoints; it needs PyTorch only."""
        about, rest = inspect.getsource(checkpointed).split("\n", 1)
        lines = [f"    {name!r}: {kept!r},\n" for name, kept in self.kept.items()]
        empty = next(line for line in rest.splitlines(keepends=True) if line.startswith("CHECKPOINTS"))
        filled = f"{empty.rstrip()[:-1]}\n{''.join(lines)}}}\n" if lines else empty
        write_text(path, f'"""{self}\n\n{about.strip(chr(34))}\n"""\n{rest.replace(empty, filled)}')

    def __str__(self) -> str:
        n_kept = sum(len(numbers) for numbers, _ in self.kept.values())
        modules = f"{len(self.kept)} module{'s' * (len(self.kept) != 1)}"
        within = f"; results kept in them: {n_kept}" if self.language == "selective" else ""
        return (
            f"Checkpoints of '{self.name}': {modules}{within}.\n"
            f"Peak {format_size(self.peak_bytes)} of {format_size(self.budget_bytes)}, overhead {self.overhead:.1%}; "
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
        language: ``blocks`` keeps nothing within a checkpoint, ``selective`` keeps the results of some calls.
        blocks: names of the modules that may become checkpoints; by default those that stand in a row, or consist of
            layers only.

    Raises:
        InvalidInput: no such checkpoints fit the budget; the model has no blocks; an option is wrong.
    """
    if not issubclass(type(module), Rematerialized):  # isinstance asks the model's class
        raise InvalidInput("checkpoints takes the module that rematerialize returns")
    if language not in LANGUAGES:
        raise unknown_name("language", language, LANGUAGES)
    return _Search(module, sample_args, keywords(sample_kwargs), blocks).best(language)


@dataclass(slots=True)
class _Call:
    """A call in a run of a block.

    Attributes:
        signature: see `call_signature`.
        made: [storage] bytes of those that it makes.
        may_be_kept: it changes nothing, and nothing changes what it makes.
        draws: random numbers.
    """

    signature: str
    made: dict[int, int]
    may_be_kept: bool
    draws: bool


@dataclass(slots=True)
class _Run:
    """One run of a block in a step.

    Attributes:
        block: its name.
        changes_input: in place.
        before, after: bytes that the step holds when the run begins and ends.
        starts, ends: in numbers of the step's calls; the second start is that of the repetition.
        calls: of the first run, as policies count them.
        repeated: calls of the repetition, which ends early where the backward pass needs no more.
    """

    block: str
    before: int = 0
    after: int = 0
    changes_input: bool = False
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    calls: list[_Call] = field(default_factory=list)
    repeated: list[_Call] = field(default_factory=list)


class _Calls(TorchDispatchMode):
    """Notes the calls that a policy of selective checkpointing is asked about."""

    def __init__(self, calls: list[_Call]):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NOT_IN_POLICIES:
            return func(*args, **kwargs)
        signature, given = call_signature(func, args, kwargs), tensors_of((args, kwargs))
        made = func(*args, **kwargs)
        old = set(map(storage_key, given))
        changes = schema_of(func).is_mutable
        if changes:
            for call in self.calls:
                call.may_be_kept &= old.isdisjoint(call.made)
        new = {storage_key(x): storage_bytes(x) for x in tensors_of(made) if storage_key(x) not in old}
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self.calls.append(_Call(signature if new or changes else "", new, bool(new) and not changes, draws))
        return made


class _Search:
    """Choices of checkpoints for one step, and what PyTorch makes of them."""

    def __init__(
        self, module: Rematerialized, args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: Sequence[str] | None
    ):  # fmt: skip
        self.model, planner = module.model, module._planner
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
        self.plain, self.plain_runs = self._followed(_marked)
        if self._leave_out({run.block for run in self.plain_runs if run.changes_input}, blocks):
            self.plain, self.plain_runs = self._followed(_marked)
        try:
            self.all, self.runs = self._followed(_marked_checkpoint)
        except RuntimeError as error:
            text = headline(error, 160)
            raise InvalidInput(f"the blocks cannot run again ({text}): leave the cause out of blocks=") from error
        self.graph, self.weights = step.graph, dict[str, tuple[int, int]]()
        self._weigh({*self.plain.signatures, *self.all.signatures})

    def _checked(self, blocks: Sequence[str] | None) -> list[str]:
        known = dict(self.model.named_modules())
        if isinstance(blocks, str) or not isinstance(blocks, (Sequence, type(None))):
            raise InvalidInput(f"blocks must be a list of names of modules, not {blocks!r:.60}")
        names = list(blocks_of(self.model) if blocks is None else blocks)
        for name in names:
            if name not in known or not name:
                raise unknown_name("block", name, [other for other in known if other])
            if any(name.startswith(f"{other}.") for other in names):
                raise InvalidInput(f"the block '{name}' is inside of another; give either")
        if not names:
            raise InvalidInput("no block was found in the model: give blocks=[names of modules], see named_modules()")
        return list(dict.fromkeys(names))

    def _leave_out(self, changing: set[str], given: Sequence[str] | None) -> bool:
        """Leave out blocks that change their inputs in place, and cannot run again; returns whether there are any."""
        if changing and given is not None:
            raise InvalidInput(f"the block '{min(changing)}' changes its input in place: leave it out of blocks=")
        self.blocks = [name for name in self.blocks if name not in changing]
        if not self.blocks:
            raise InvalidInput("every block changes its input in place: give blocks=[names of other modules]")
        return bool(changing)

    def best(self, language: str) -> Checkpoints:
        """The cheapest choice that fits."""
        budget = self.planner.budget_bytes - self.fixed_bytes
        tried = self._tried(_Program(self, keeps=False), budget)
        if language == "selective":  # which can do all that blocks can
            tried |= self._tried(_Program(self, keeps=True), budget)
        fitting = {choice: found for choice, found in tried.items() if found[0] <= budget}
        if not fitting:
            least = min(peak for peak, _ in tried.values()) + self.fixed_bytes
            raise InvalidInput(
                f"no checkpoints of {len(self.blocks)} blocks fit {format_size(self.planner.budget_bytes)}: the step "
                f"needs {format_size(least)} with them; give a larger budget, or smaller blocks=[names of modules]"
            )
        choice, (peak, cost) = min(fitting.items(), key=lambda item: (item[1][1], len(item[0])))
        return Checkpoints(
            self.planner.name, language, dict(choice), self.planner.budget_bytes, self.fixed_bytes + peak,
            cost / self._cost(self.plain) - 1, self.free.overhead,
        )  # fmt: skip

    def _tried(self, program: _Program, budget: int) -> dict[tuple[Any, ...], tuple[int, int]]:
        """[choice] (peak, cost), followed; the budget of the integer program follows what PyTorch needs."""
        everything, aim = program.nothing_kept(), budget
        tried = {tuple(everything.items()): self._judged(everything)}
        for _ in range(MOST_CHOICES):
            kept = program.cheapest(aim)
            if kept is None:
                break
            choice = tuple(kept.items())
            if choice not in tried:
                tried[choice] = self._judged(kept)
                aim += budget - tried[choice][0]
            elif tried[choice][0] > budget:
                aim -= round(SMALLER * budget)
            else:
                break
        return tried

    def _judged(self, kept: Mapping[str, tuple[tuple[int, ...], bool]]) -> tuple[int, int]:
        """(peak, cost) of a step with these checkpoints, both followed through PyTorch's own code."""
        silent = {name: (numbers, False) for name, (numbers, _) in kept.items()}  # no random state on such tensors
        checkpointed.apply(self.model, silent)
        try:
            step = plain_step(self.model, self.args, self.kwargs, self.planner.outside)
        finally:
            checkpointed.undo(self.model)
        self._weigh(set(step.signatures))
        draw = sum(kept[run.block][1] for run in self.runs if run.block in kept)
        states = (draw + 1) * random_state(torch.device("cpu")).nbytes if draw else 0  # one more while it repeats
        return max(self.totals(step)) + states, self._cost(step)

    def _weigh(self, signatures: set[str]) -> None:
        new = signatures - self.weights.keys() - {""}
        if new:
            self.weights |= self.planner.weigh_calls(new, self.graph)

    def totals(self, step: FollowedStep) -> list[int]:
        """[calls] bytes that the step holds while each runs, its workspace included."""
        calls = zip(step.held_bytes, step.signatures, strict=True)
        return [held + self.weights.get(signature, (0, 0))[0] for held, signature in calls]

    def _cost(self, step: FollowedStep) -> int:
        return sum(self.weights[signature][1] for signature in step.signatures if signature)

    def _followed(self, wrap: Callable[..., Any]) -> tuple[FollowedStep, list[_Run]]:
        """A step with `wrap` around every block, and the runs of blocks in it."""
        runs, followers = list[_Run](), list[Follower]()

        def start(follower: Follower) -> None:
            runs.clear()
            followers[:] = [follower]

        blocks = {name: self.model.get_submodule(name) for name in self.blocks}
        wrapped = {name: wrap(block.forward, name, runs, followers) for name, block in blocks.items()}
        with forwards_replaced(self.model, wrapped):
            step = plain_step(self.model, self.args, self.kwargs, self.planner.outside, start)
        return step, runs


def _marked(
    forward: Callable[..., Any], name: str, runs: list[_Run], followers: list[Follower], wraps: bool = False
) -> Callable[..., Any]:
    """`forward`, which notes its runs; as a checkpoint if `wraps`."""

    def called(*args: Any, **kwargs: Any) -> Any:
        run, (follower,) = _Run(name), followers
        runs.append(run)

        def body(*args: Any, **kwargs: Any) -> Any:
            run.starts.append(len(follower.signatures))
            if len(run.starts) == 1:
                run.before = follower.total_bytes
            given = [(x, x._version) for x in tensors_of((args, kwargs))]
            try:
                return casting_anew(forward)(*args, **kwargs)
            finally:
                run.ends.append(len(follower.signatures))
                run.changes_input |= any(x._version != version for x, version in given)

        def contexts() -> tuple[_Calls, _Calls]:
            return _Calls(run.calls), _Calls(run.repeated)

        made = body(*args, **kwargs) if not wraps else checkpoint(
            body, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs
        )  # fmt: skip
        run.after = follower.total_bytes
        return made

    return called


def _marked_checkpoint(*args: Any) -> Callable[..., Any]:
    return _marked(*args, wraps=True)


class _Program:
    """The choice as an integer program: which blocks are checkpoints, and which results they keep.

    Columns: one per block, one per call whose result may be kept. Each row bounds what is held while a block runs, when
    the backward pass begins, or during a block's backward pass: what earlier runs of blocks left, and the rest.
    """

    def __init__(self, search: _Search, keeps: bool):
        self.search = search
        names = list(dict.fromkeys(run.block for run in search.runs))
        self.draws = {run.block for run in search.runs if any(call.draws for call in run.calls)}
        self.columns = {(name, -1): i for i, name in enumerate(names)}
        self.together: list[list[int]] = []  # columns of which all or none are chosen
        for name in names if keeps else ():
            numbers, drawing = _keepable([run for run in search.runs if run.block == name])
            self.columns.update({(name, number): len(self.columns) + i for i, number in enumerate(numbers)})
            self.together.append([self.columns[name, number] for number in drawing])
        self.cost = self._costs()
        self.limits = [*self._limits()]

    def cheapest(self, budget_bytes: int) -> dict[str, tuple[tuple[int, ...], bool]] | None:
        """The cheapest choice within the budget, as `Checkpoints.kept`; None if there is none."""
        from remat.programs import highs, program  # they import SciPy, which training does not need

        held = np.array([row for row, _ in self.limits])
        most = np.array([budget_bytes - rest for _, rest in self.limits])
        pairs = [(j, self.columns[name, -1]) for (name, number), j in self.columns.items() if number >= 0]
        pairs += [pair for group in self.together for pair in permutations(group, 2)]
        needs = np.zeros((len(pairs), len(self.columns)))  # the first column of a pair needs the second
        for k, (column, needed) in enumerate(pairs):
            needs[k, column], needs[k, needed] = 1, -1
        scale = program.scale_of(budget_bytes)
        rows, most = np.vstack([held * scale, needs]), np.concatenate([most * scale, np.zeros(len(pairs))])
        fewer = TIE * max(1.0, self.cost.max(initial=0)) * np.array([number < 0 for _, number in self.columns])
        found = highs.cheapest_columns(self.cost + fewer, rows, np.full(len(rows), -np.inf), most, SEARCH_S)
        if found is None:
            return None
        picked = [key for key, is_chosen in zip(self.columns, found, strict=True) if is_chosen]
        return {
            name: (tuple(k for block, k in picked if block == name and k >= 0), name in self.draws)
            for name, number in picked if number < 0
        }  # fmt: skip

    def nothing_kept(self) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Every block as a checkpoint that keeps nothing."""
        return {name: ((), name in self.draws) for name, number in self.columns if number < 0}

    def _costs(self) -> np.ndarray:
        """[columns] by which choices change the cost of the step."""
        cost, weights = np.zeros(len(self.columns)), self.search.weights
        for run in self.search.runs:
            for number, call in enumerate(run.repeated):
                of_call = weights.get(call.signature, (0, 0))[1]
                cost[self.columns[run.block, -1]] += of_call
                if (run.block, number) in self.columns:
                    cost[self.columns[run.block, number]] -= of_call
        return cost

    def _limits(self) -> Iterator[tuple[np.ndarray, int]]:
        """([columns] bytes by which choices change what is held, bytes held with no choice) at each bounded moment."""
        search, held = self.search, np.zeros(len(self.columns))
        totals = search.totals(search.all)
        begins = sorted(run.starts[1] for run in search.runs if len(run.starts) > 1)
        ends = dict(zip(begins, [*begins[1:], len(totals)], strict=True))
        for run, plain in zip(search.runs, search.plain_runs, strict=True):
            yield held.copy(), plain.before + max(totals[run.starts[0] : run.ends[0]], default=run.before) - run.before
            for start in run.starts[1:2]:
                yield held.copy(), plain.before + max(totals[start : ends[start]]) - run.before
            held[self.columns[run.block, -1]] += (run.after - run.before) - (plain.after - plain.before)
            for number, call in enumerate(run.calls):
                if (run.block, number) in self.columns:
                    held[self.columns[run.block, number]] += sum(call.made.values())
        if search.runs:
            last, first = search.runs[-1], min(begins, default=len(totals))
            rest = max(totals[last.ends[0] : first], default=last.after) - last.after
            yield held, search.plain_runs[-1].after + rest


def _keepable(runs: Sequence[_Run]) -> tuple[list[int], list[int]]:
    """Numbers of the calls of a block whose results may be kept, and those among them that draw random numbers.

    All of its runs make the same calls. Of calls that draw all are kept or none, because a repetition draws in order.
    """
    first = runs[0]
    if any([c.signature for c in run.calls] != [c.signature for c in first.calls] for run in runs):
        return [], []
    n = min(len(run.repeated) for run in runs)
    drawing = [k for k in range(n) if first.calls[k].draws]
    if any(not first.calls[k].may_be_kept for k in drawing):
        drawing = []
    free = [k for k in range(n) if first.calls[k].may_be_kept and not first.calls[k].draws]
    return sorted(free + drawing), drawing
