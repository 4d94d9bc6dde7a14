"""Published numbers beside ours: what counts as worse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from analysis import figures
from analysis.batches import STATED, continuous, max_found
from analysis.paper import sizes
from analysis.parts import Study
from analysis.style import style_of
from experiments import checkmate, peers
from experiments.peers import BETTER, DIFFERS, HEADS, OPEN, SAME, WORSE, Number, moccasin, slowdowns


@pytest.mark.parametrize(
    ("published", "ours", "how", "verdict"),
    [
        (1.14, 1.145, {}, BETTER),  # of a cost: within half a percent
        (1.14, 1.15, {}, WORSE),
        (1.14, 0.9, {}, BETTER),
        (289, 289, {"more_is_better": True}, BETTER),
        (289, 266, {"more_is_better": True}, WORSE),
        (-5.3, -5.26, {"signed": True}, BETTER),  # a difference in percent: within a twentieth of a point
        (-5.3, -5.2, {"signed": True}, WORSE),
        (8.72, 7.9, {"signed": True}, BETTER),
        (1.0, None, {}, OPEN),
        (1.25, 1.29, {"is_baseline": True}, SAME),  # neither better nor worse: within 5 %
        (7.07, 1.89, {"is_baseline": True}, DIFFERS),
    ],
)
def test_verdicts(published: float, ours: float | None, how: dict[str, bool], verdict: str) -> None:
    number = Number("paper", "what", published, ours, "the cause", **how)
    assert number.verdict == verdict
    assert len(number.cells()) == len(HEADS)
    assert number.cells()[-1] == (verdict if verdict in (BETTER, SAME) else f"{verdict}: the cause")


def test_a_published_batch_is_a_rounded_real_number(tmp_path: Path) -> None:
    def document(network: str, parameter_bytes: int, found: int) -> dict[str, Any]:
        return {
            "network": network, "memory_bytes": 16_000, "parameter_bytes": parameter_bytes, "working_set_bytes": 250,
            "published": [{"rule": STATED, "batch": 60, "strategy": "checkmate_milp"}] if network != "fcn8" else [],
            "proven": {STATED: found},
            "records": [{"strategy": "portfolio", "found": {STATED: found}, "found_bytes": {STATED: 250}}],
            "rules": [{"name": STATED, "label": "a rule"}],
        }  # fmt: skip

    documents = [document("fcn8", 1600, 57), document("fcn8_plain", 1100, 59), document("unet", 900, 60)]
    study = Study({"fig6": {"document": {"documents": documents}}}, {}, tmp_path)
    found = list(peers.batches(study))
    assert [(number.ours, number.verdict) for number in found] == [(60, BETTER), (60, BETTER)]
    assert "59.6000 as a real number" in found[0].what  # whole samples: 59
    part = sizes.fig6({"documents": documents}, study)
    assert "In 2 of 2 networks" in part.ours
    assert part.tables[0].rows[1][:4] == ["FCN8, plain encoder", "60", "59.6000", "59.6000"]


def test_the_artifacts_rule_gives_the_published_batches() -> None:
    """Its batch is a real number, e.g. 289.03459 in its README, and the published one is rounded."""
    known = {document["network"]: document for document in checkmate.stored_study().document("fig6")["documents"]}
    for network, (real, published) in {"vgg19": (289.0346, 289), "unet": (61.40, 61), "segnet": (61.66, 62),
                                       "fcn8_plain": (59.62, 60)}.items():  # fmt: skip
        found = continuous(known[network])
        assert found == pytest.approx(real, abs=0.005)
        assert round(found) == published
        assert max_found(known[network], STATED) == int(found)  # whole samples


def test_the_first_table_says_where_others_are_ahead() -> None:
    table = peers.claims([["a paper", "what", "1", "2", "", ""]])
    assert "| a paper | what | 1 | 2 |  |  |" in table
    unet = next(line for line in table.splitlines() if "U-Net, batch 11, 6 GiB" in line)
    theirs, _, ours, measured = (cell.strip() for cell in unet.split("|")[3:7])
    assert (theirs, measured) == ("6.03%, 0.006%, 777 s", "")
    assert float(ours.split(",")[1].strip(" %")) > 0.006  # their gap is tighter
    assert all(len(line.split("|")) == len(peers.CLAIM_HEADS) + 2 for line in table.splitlines())


def test_a_record_is_filled_if_its_gap_is_closed() -> None:
    row = {"budget": "5 GiB", "budget_bytes": 5, "total_cost": 100, "record_cost": 150, "record_gap": 0.2,
           "record_s": 9e4, "record_proven": False, "cost": 120, "bound": 120, "wall_s": 60.0,
           "threads": 2}  # fmt: skip
    (axes,) = figures.records([row]).axes
    faces = {line.get_marker(): line.get_markerfacecolor() for line in axes.lines if line.get_marker() in ("o", "*")}
    assert faces == {"o": "white", "*": style_of("portfolio").colour}


def test_every_stored_result_of_the_rivals_has_a_number() -> None:
    found = [*moccasin(), *slowdowns()]
    assert len(found) >= 27
    assert all(number.ours is not None for number in found)
