"""Published numbers beside ours: what counts as worse."""

from __future__ import annotations

import pytest

from analysis.batches import STATED, continuous, max_found
from experiments import checkmate
from experiments.peers import moccasin, slowdowns


def test_the_artifacts_rule_gives_the_published_batches() -> None:
    """Its batch is a real number, e.g. 289.03459 in its README, and the published one is rounded."""
    known = {document["network"]: document for document in checkmate.stored_study().document("fig6")["documents"]}
    for network, (real, published) in {"vgg19": (289.0346, 289), "unet": (61.40, 61), "segnet": (61.66, 62),
                                       "fcn8_plain": (59.62, 60)}.items():  # fmt: skip
        found = continuous(known[network])
        assert found == pytest.approx(real, abs=0.005)
        assert round(found) == published
        assert max_found(known[network], STATED) == int(found)  # whole samples


def test_every_stored_result_of_the_rivals_has_a_number() -> None:
    found = [*moccasin(), *slowdowns()]
    assert len(found) >= 27
    assert all(number.ours is not None for number in found)
