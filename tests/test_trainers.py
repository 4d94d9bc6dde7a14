"""The loops of other libraries train a rematerialized module as they train the plain model."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest

import remat.torch as rt

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_ten_steps_with_checkpoints_and_evaluation_have_the_plain_losses(library, monkeypatch, caplog) -> None:
    pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    name = {"transformers": "transformers_trainer", "accelerate": "accelerate_loop", "lightning": "lightning_fit"}
    example = importlib.import_module(name[library])
    plan = rt.rematerialize
    quick = {"cost": "flops", "time_limit_s": 0.5}
    monkeypatch.setattr(rt, "rematerialize", lambda *args, **options: plan(*args, **{**options, **quick}))
    plain = example.main(budget=None)
    with caplog.at_level(logging.WARNING, logger="remat"):
        assert example.main() == plain
    assert len(plain) >= 10
    assert not [record for record in caplog.records if record.name == "remat"], "a loop that waits for a plan"
    sys.modules.pop(name[library])
