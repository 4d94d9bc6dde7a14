"""The choice of checkpoints as an integer program whose optimum no plan of the language can beat.

Columns: one per block (is it a checkpoint), one per thing that a checkpoint may keep. Rows bound what the step holds
while a block runs, between the passes, and during a block's backward pass. Two steps are followed: the plain one, and
one whose blocks are all checkpoints. What a run of a block leaves depends on its own choice alone, so a row is the
peak of one of these moments in those two steps, changed by what the other runs leave. Each row is a lower bound on
what PyTorch needs: a kept result is there whenever the repetition would have it, and the saved tensors of a block are
all there after its repetition, whatever was kept. A choice that was followed and does not fit is excluded by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from typing import Any

import numpy as np
import torch

from remat.torch._random import random_state
from remat.torch.checkpointing.languages import Kept, Language
from remat.torch.checkpointing.runs import Run
from remat.torch.measuring.plain import FollowedStep

SEARCH_S = 10.0  # of one solve
TIE = 1e-6  # of the largest cost, per block: of choices that cost the same, the one with fewer blocks
ALIKE = "*"  # stands for every block


@dataclass(frozen=True, slots=True)
class Steps:
    """What is known of a step.

    Attributes:
        plain, all: the plain step, and the one whose blocks are all checkpoints that keep nothing.
        plain_runs, runs: of blocks in them.
        weights: [signature] (workspace in bytes, cost).
        dying: [run] bytes that the block returns, and that nothing else saves.
        marked, regions: a plain step and its runs of blocks, whose modules are marked; if the language has regions.
    """

    plain: FollowedStep
    all: FollowedStep
    plain_runs: list[Run]
    runs: list[Run]
    weights: Mapping[str, tuple[int, int]]
    dying: Sequence[int]
    marked: FollowedStep | None = None
    regions: Sequence[Run] = ()

    def totals(self, step: FollowedStep) -> np.ndarray:
        """[calls] bytes that the step holds while each runs, its workspace included."""
        return np.array(step.held_bytes) + [self.weights.get(signature, (0, 0))[0] for signature in step.signatures]

    def cost(self, signatures: Sequence[str]) -> int:
        """Cost of these calls."""
        return sum(self.weights[signature][1] for signature in signatures if signature)


@dataclass(frozen=True, slots=True)
class _Option:
    """What a run of a block holds and saves if its checkpoint keeps this."""

    held: int
    cost: int
    draws: bool = False


class Program:
    """The integer program of a language."""

    def __init__(self, steps: Steps, language: Language):
        self.steps, self.language = steps, language
        names = list(dict.fromkeys(run.block for run in steps.runs))
        self.draws = {run.block for run in steps.runs if any(call.draws for call in run.calls)}
        self.options = self._options(names)  # [run] what it may keep
        self.columns: dict[tuple[str, Any], int] = {}
        for name in names:
            self.columns.setdefault((self._place(name), None), len(self.columns))
        for run, options in zip(steps.runs, self.options, strict=True):
            for key in options:
                self.columns.setdefault((self._place(run.block), key), len(self.columns))
        self.names, self.excluded = names, list[np.ndarray]()
        self.cost = self._summed(  # change of the step's
            lambda run: steps.cost([call.signature for call in run.repeated]), lambda _, option: -option.cost
        )
        size, restores = random_state(torch.device("cpu")).nbytes, language.keeps == "regions"  # after each region
        self.states = self._summed(  # bytes of the random generator's
            lambda run: size * (run.block in self.draws), lambda run, _: size * (restores and run.block in self.draws)
        )
        self.limits = [(row + self.states, rest) for row, rest in self._limits()]

    def cheapest(self, budget_bytes: int) -> tuple[Kept | None, float]:
        """(the cheapest choice in the budget, None if there is none; a bound on its cost above the plain step's)."""
        from remat.programs import highs, program  # they import SciPy, which training does not need

        held = np.array([row for row, _ in self.limits])
        most = np.array([budget_bytes - rest for _, rest in self.limits], float)
        rules = [*self._rules()]
        scale = program.scale_of(budget_bytes)
        rows = np.vstack([held * scale, *(row for row, _ in rules)])
        most = np.concatenate([most * scale, [upper for _, upper in rules]])
        largest = max(1.0, self.cost.max(initial=0))
        fewer = TIE * largest * np.array([key is None for _, key in self.columns])
        lowest = np.full(len(rows), -np.inf)
        found, bound = highs.cheapest_columns(self.cost + fewer, rows, lowest, most, SEARCH_S)
        bound -= fewer.sum()
        return None if found is None else self._kept(found), bound

    def exclude(self, kept: Kept) -> None:
        """Never choose this again."""
        self.excluded.append(self._chosen(kept))

    def _chosen(self, kept: Kept) -> np.ndarray:
        """[columns] whether they are chosen."""
        return np.array([
            any(name in kept and (key is None or key in kept[name][0]) for name in self._blocks(place))
            for place, key in self.columns
        ])  # fmt: skip

    def nothing_kept(self) -> Kept:
        """Every block as a checkpoint that keeps nothing."""
        return {name: ((), name in self.draws) for name in self.names}

    def _place(self, name: str) -> str:
        return ALIKE if self.language.is_alike else name

    def _blocks(self, place: str) -> list[str]:
        return self.names if place == ALIKE else [place]

    def _kept(self, found: np.ndarray) -> Kept:
        picked = [key for key, is_chosen in zip(self.columns, found, strict=True) if is_chosen]
        return {
            name: (tuple(k for other, k in picked if other == place and k is not None), name in self.draws)
            for place, key in picked if key is None for name in self._blocks(place)
        }  # fmt: skip

    def _rules(self) -> Iterator[tuple[np.ndarray, float]]:
        """(row, its upper end): only checkpoints keep; what draws is kept together; regions are not nested."""
        drawing = {key for options in self.options for key, option in options.items() if option.draws}
        for place in {place for place, _ in self.columns}:
            keys = [key for other, key in self.columns if other == place and key is not None]
            whole = self.columns[place, None]
            pairs = [(self.columns[place, key], whole) for key in keys]
            if self.language.keeps != "regions":  # a repetition draws in order
                pairs += permutations([self.columns[place, key] for key in keys if key in drawing], 2)
            for column, needed in pairs:
                yield self._row({column: 1, needed: -1}), 0
            for one, other in combinations(keys, 2) if self.language.keeps == "regions" else ():
                if f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}."):
                    yield self._row({self.columns[place, one]: 1, self.columns[place, other]: 1}), 1
        for choice in self.excluded:
            yield 2.0 * choice - 1, choice.sum() - 1

    def _row(self, terms: Mapping[int, float]) -> np.ndarray:
        row = np.zeros(len(self.columns))
        for column, factor in terms.items():
            row[column] += factor
        return row

    def _own(self, run: int) -> list[tuple[int, _Option]]:
        """(column, option) of what a run may keep."""
        place = self._place(self.steps.runs[run].block)
        return [(self.columns[place, key], option) for key, option in self.options[run].items()]

    def _summed(self, of_run: Callable[[Run], float], of_option: Callable[[Run, _Option], float]) -> np.ndarray:
        """[columns] what choices add: to each run that is a checkpoint, and for each thing that it keeps."""
        row = np.zeros(len(self.columns))
        for i, run in enumerate(self.steps.runs):
            row[self.columns[self._place(run.block), None]] += of_run(run)
            for column, option in self._own(i):
                row[column] += of_option(run, option)
        return row

    def states_of(self, kept: Kept) -> int:
        """Bytes of the random generator's states that a step with this choice keeps, with one more while it repeats."""
        n_bytes = int(self.states @ self._chosen(kept))
        return n_bytes + (n_bytes > 0) * random_state(torch.device("cpu")).nbytes

    def _limits(self) -> Iterator[tuple[np.ndarray, float]]:
        """([columns] bytes by which choices change what is held, bytes held with no choice) at each bounded moment."""
        steps, runs = self.steps, self.steps.runs
        plain, every = steps.totals(steps.plain), steps.totals(steps.all)
        whole = [self.columns[self._place(run.block), None] for run in runs]
        pairs = [*zip(steps.plain_runs, runs, strict=True)]
        above = [b.before - a.before for a, b in pairs] + [b.after - a.after for a, b in pairs[-1:]]
        more = np.diff(above).tolist()  # that a checkpoint leaves above the plain run
        # When it begins to run, the next block has what this one returns. Later nobody may. What it keeps comes below.
        left = [self._row({whole[i]: n_bytes - steps.dying[i]}) for i, n_bytes in enumerate(more)]
        for i in range(len(runs)):
            for column, option in self._own(i):
                left[i][column] += option.held

        def limit(peaks: Sequence[int], others: Sequence[int], i: int) -> tuple[np.ndarray, float]:
            """While run `i` runs: of peaks in the plain step and in the other; `others` have left something."""
            row = sum((left[j] for j in others), np.zeros(len(self.columns)))
            row[whole[i]] += peaks[1] - sum(more[j] for j in others) - peaks[0]
            return row, float(peaks[0])

        for i, (a, b) in enumerate(pairs):
            yield limit((_most(plain, a.starts[0], a.ends[0]), _most(every, b.starts[0], b.ends[0])), range(i), i)
            if len(a.starts) > 1 and len(b.starts) > 1:
                yield from self._backward(i, plain, every, limit)
        if runs:
            begins = min((run.starts[1] for run in steps.plain_runs if len(run.starts) > 1), default=None)
            yield sum(left, np.zeros(len(self.columns))), float(_most(plain, steps.plain_runs[-1].ends[0], begins))

    def _backward(
        self, i: int, plain: np.ndarray, every: np.ndarray, limit: Callable[..., tuple[np.ndarray, float]]
    ) -> Iterator[tuple[np.ndarray, float]]:
        """Limits of the backward pass of run `i`: after the repetition, and in it, where what is kept may help."""
        runs = self.steps.runs
        a, b = self.steps.plain_runs[i], runs[i]
        others = [j for j, run in enumerate(runs) if len(run.starts) > 1 and run.starts[1] > b.starts[1]]
        ends = [min((x.starts[1] for x in of if len(x.starts) > 1 and x.starts[1] > own.starts[1]), default=None)
                for of, own in ((self.steps.plain_runs, a), (runs, b))]  # fmt: skip
        before, repeated = _most(plain, a.starts[1], ends[0]), _most(every, b.starts[1], ends[1])
        least = _most(every, b.ends[1], ends[1])
        if self.language.keeps in ("calls", "operators"):  # what is kept needs no workspace, and is there earlier
            least = max(least, max(self.steps.all.held_bytes[b.starts[1] : ends[1]], default=0))
        own = self._own(i)
        row, rest = limit((before, repeated), others, i)
        for column, _ in own:
            row[column] -= max(0, repeated - least)
        yield row, rest
        if own:
            yield limit((before, least), others, i)

    def _options(self, names: Sequence[str]) -> list[dict[Any, _Option]]:
        """[run] what it may keep; a run that the backward pass does not come to keeps nothing, and saves nothing."""
        return [
            own if len(run.starts) > 1 else {key: _Option(0, 0, option.draws) for key, option in own.items()}
            for run, own in zip(self.steps.runs, self._options_of_runs(names), strict=True)
        ]

    def _options_of_runs(self, names: Sequence[str]) -> list[dict[Any, _Option]]:
        keeps, runs = self.language.keeps, self.steps.runs
        if not keeps:
            return [{} for _ in runs]
        if keeps == "regions":
            return self._common([self._regions(run) for run in self.steps.regions])
        of_calls = {name: _keepable([run for run in runs if run.block == name]) for name in names}
        if keeps == "calls":
            return [self._calls(run, *of_calls[run.block]) for run in runs]
        return self._common([self._operators(run, *of_calls[run.block]) for run in runs])

    def _common(self, options: list[dict[Any, _Option]]) -> list[dict[Any, _Option]]:
        """What every run that is chosen for together may keep."""
        of, places = dict[str, set[Any]](), [self._place(run.block) for run in self.steps.runs]
        for place, own in zip(places, options, strict=True):
            of[place] = of.get(place, {*own}) & {*own}
        return [
            {key: option for key, option in own.items() if key in of[place]}
            for place, own in zip(places, options, strict=True)
        ]

    def _calls(self, run: Run, numbers: Sequence[int], drawing: Sequence[int]) -> dict[Any, _Option]:
        return {k: self._of_calls(run, [k], k in drawing) for k in [*numbers, *drawing] if k < len(run.repeated)}

    def _operators(self, run: Run, numbers: Sequence[int], drawing: Sequence[int]) -> dict[Any, _Option]:
        """Operators each of whose calls may be kept; of some, the first, the third, ... call is."""
        calls, of = {*numbers, *drawing}, dict[str, list[int]]()
        for k, call in enumerate(run.calls):
            of.setdefault(call.operator, []).append(k)
        n_seconds = 0
        for k, call in enumerate(run.calls):
            if call.operator in self.language.every_second:
                n_seconds += 1
                if n_seconds % 2 == 0:
                    of[call.operator].remove(k)
        return {
            operator: self._of_calls(run, own, any(k in drawing for k in own))
            for operator, own in of.items() if own and calls.issuperset(own)
        }  # fmt: skip

    def _of_calls(self, run: Run, numbers: Sequence[int], draws: bool) -> _Option:
        held = sum(sum(run.calls[k].made.values()) for k in numbers)
        return _Option(
            held, self.steps.cost([run.repeated[k].signature for k in numbers if k < len(run.repeated)]), draws
        )

    def _regions(self, run: Run) -> dict[Any, _Option]:
        """Modules that run once in the block."""
        assert self.steps.marked is not None
        found = {}
        for name, (region, *more) in run.regions.items():
            if not more and region.is_whole and region.held:
                held = sum(size for key, size in region.held.items() if key not in run.returned)
                signatures = self.steps.marked.signatures[region.start : region.end]
                found[name.removeprefix(f"{run.block}.")] = _Option(held, self.steps.cost(signatures))
        return found


def _most(totals: np.ndarray, start: int, end: int | None) -> int:
    return int(totals[start:end].max(initial=0))


def _keepable(runs: Sequence[Run]) -> tuple[list[int], list[int]]:
    """Numbers of the calls of a block whose results may be kept: of those that draw no random numbers, and of others.

    All of its runs make the same calls. Of calls that draw all are kept or none, because a repetition draws in order.
    """
    first = runs[0]
    if any([c.signature for c in run.calls] != [c.signature for c in first.calls] for run in runs):
        return [], []
    drawing = [k for k, call in enumerate(first.calls) if call.draws]
    if any(not first.calls[k].may_be_kept for k in drawing):
        drawing = []
    return [k for k, call in enumerate(first.calls) if call.may_be_kept and not call.draws], drawing
