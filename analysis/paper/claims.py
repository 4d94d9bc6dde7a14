"""The headline numbers of the paper beside ours, each with its denominator."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.batches import OPTIMUM, found_by, max_found, network_label
from analysis.paper.sweeps import SOURCE, Sweep, largest_gain, sweeps
from analysis.parts import Part, Study, prose
from analysis.results import PAPERS_HEURISTICS
from analysis.style import style_of

FASTER, FASTER_PUBLISHED, FASTER_ON = "faster than the best heuristic at an equal budget", "1.2x [2nd]", "unet"
FASTER_AT = 16 * 10**9  # bytes of the V100, where it was claimed
EARLY, EARLY_PUBLISHED = (
    "faster than the best heuristic, any budget",
    "4.8x (an early abstract; its denominator is not given)",
)
HELD = ", checkpoints held to the end (as the artifact counts)"


@dataclass(frozen=True, slots=True)
class Larger:
    """A claim about the largest batch: its ratio to that of `than` (None: the best heuristic), on networks `on`."""

    words: str
    published: float
    than: str | None
    on: Sequence[str]

    def ours(self, document: Mapping[str, Any], rule: str) -> tuple[float, int, str] | None:
        """(our ratio on a network, the batch below it, its strategy); None without that batch."""
        found = found_by(document, rule)
        batches = [(found.get(name) or 0, name) for name in ([self.than] if self.than else PAPERS_HEURISTICS)]
        batch, name = max(batches, key=lambda one: one[0])
        return (max_found(document, rule) / batch, batch, name) if batch else None


LARGER = (
    Larger("a larger batch than checkpoint-all", 5.1, "checkpoint_all", ("mobilenet",)),
    Larger("a larger batch than the best heuristic", 1.73, None, ("mobilenet", "unet")),
)


def report(document: Mapping[str, Any], study: Study) -> Part:
    """Rows for each claim: where the paper makes it, and where it is largest here."""
    rows: list[list[str]] = []
    all_sweeps = list(sweeps(document, study))
    for source, words in SOURCE.items():
        rows += _speedups([sweep for sweep in all_sweeps if sweep.source == source], words)
    if "fig6" in study.heads:
        documents = study.document("fig6")["documents"]
        for claim in LARGER:
            for rule in documents[0]["rules"] if documents else ():
                rows += _batches(claim, documents, rule)
    return Part(
        *prose("claims"),
        tables=[("claims", [
            "claim", "published", "ours", "where", "denominator", "published batch over it",
        ], rows)],
    )  # fmt: skip


def _speedups(group: Sequence[Sweep], words: str) -> Iterator[list[str]]:
    """The best heuristic's cost over the cheapest plan's: where the paper claims it, and where it is largest here."""
    own = [sweep for sweep in group if sweep.network == FASTER_ON]
    asked = (
        (FASTER, FASTER_PUBLISHED, largest_gain(own, budget_bytes=FASTER_AT), ""),
        (FASTER, FASTER_PUBLISHED, largest_gain(own, budget_bytes=FASTER_AT, artifact=True), HELD),
        (FASTER, FASTER_PUBLISHED, largest_gain(group), ""),
        (FASTER, FASTER_PUBLISHED, largest_gain(group, artifact=True), HELD),
        (EARLY, EARLY_PUBLISHED, largest_gain(group, useful=float("inf")), ""),
    )
    for claim, published, gain, how in asked:
        if gain is not None:
            where = f"{gain.sweep.label} at {gain.budget_bytes / 1e9:.2f} GB, {words}"
            yield [claim, published, f"{gain.ratio:.2f}x", where, f"{style_of(gain.heuristic).label}{how}", ""]


def _batches(claim: Larger, documents: Sequence[Mapping[str, Any]], rule: Mapping[str, str]) -> Iterator[list[str]]:
    """The largest batch over the best one of the strategies in the claim."""
    found = [(*own, document) for document in documents if (own := claim.ours(document, rule["name"])) is not None]
    largest = max(found, key=lambda one: one[0], default=None)
    for ratio, batch, name, document in found:
        if document["network"] in claim.on or document is (largest and largest[3]):
            published = [p["batch"] for p in document["published"]
                         if (p["strategy"], p["rule"]) == (OPTIMUM, rule["name"])]  # fmt: skip
            yield [
                claim.words, f"{claim.published:g}x [code]", f"{ratio:.2f}x",
                f"{network_label(document)}, {rule['label']}", f"{style_of(name).label}: batch {batch}",
                f"{published[0] / batch:.2f}x" if published else "",
            ]  # fmt: skip
