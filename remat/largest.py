"""The search for a largest size, e.g. a batch: which one to try next."""

from __future__ import annotations

from dataclasses import dataclass, field

GREATEST = 1 << 30  # size


@dataclass(slots=True)
class SizeSearch:
    """Steps away from a first size until one fits and one does not, then halves the range between them.

    Attributes:
        first: size to try.
        step: from the first size to the next; None for as much as the first one.
        growth: factor from one step to the next.
        found: the largest size that fits, 0 if none is known to.
        ruled_out: the smallest size proven impossible; larger ones count as impossible, too.
        undecided: sizes whose trial neither fitted nor was proven impossible.
        closes: whether to go on between the undecided sizes and the impossible ones.
        share: of a size, within which the search may end.
    """

    first: int
    step: int | None = None
    growth: int = 2
    found: int = 0
    ruled_out: int | None = None
    undecided: list[int] = field(default_factory=list)
    closes: bool = False
    share: float = 0.0

    def next_size(self) -> int | None:
        """The size to try next; None if the search is over."""
        ruled_out = GREATEST if self.ruled_out is None else self.ruled_out
        tried = [size for size in self.undecided if size > self.found]
        least = min([ruled_out, *tried])
        if self.found < self.first < least:
            return self.first
        if least - self.found > max(1, int(self.share * self.found)):
            return (self.found + least) // 2
        most = max([self.found, *(size for size in tried if size < ruled_out)])
        return (most + ruled_out) // 2 if self.closes and ruled_out - most > 1 else None

    def learn(self, size: int, *, fits: bool, impossible: bool) -> None:
        """Record a trial."""
        if fits:
            self.found = max(self.found, size)
        elif impossible:
            self.ruled_out = size if self.ruled_out is None else min(size, self.ruled_out)
        else:
            self.undecided.append(size)
        if size == self.first:
            step = size if self.step is None else self.step
            self.first, self.step = size + step if fits else size - step, self.growth * step
