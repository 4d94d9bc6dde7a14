"""Arguments of `remat.torch` of the wrong kind: each is refused in one line, before anything is captured."""

# pyright: reportArgumentType=false
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers import OF_ANY_KIND  # noqa: E402

import remat  # noqa: E402
import remat.torch as rt  # noqa: E402
from remat.torch import _rematerialize  # noqa: E402
from remat.torch.explaining.factory import StepFactory  # noqa: E402

MODEL, ARGS = torch.nn.Linear(4, 4), (torch.ones(2, 4),)
OF_A_STEP: dict[str, Any] = {
    "sample_kwargs": None, "backend": "eager", "optimizer": None, "cache_folder": None, "sample_args": ARGS,
}  # fmt: skip
OF_EXPLAIN: dict[str, Any] = {
    "factory": lambda batch_size=2: (MODEL, (torch.ones(batch_size, 4),)), "optimizer": "adamw", "batch_size": None,
    "precision": None, "lora": None, "link": None, "time_limit_s": 1.0, "threads": 1,
}  # fmt: skip
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "rematerialize": (rt.rematerialize, OF_A_STEP | {
        "model": MODEL, "budget": "1GB", "strategy": "search", "mode": None, "cost": "flops", "plan": None,
        "accumulate": False, "scope": "free", "time_limit_s": 1.0, "seed": 0, "threads": 1, "gpu": None,
        "implementations": "default", "verify": False, "parts": None, "optimizer_in_backward": False, "shard": None,
        "loss": None, "retain_graph": False, "target_gap": None, "offload": False,
    }),
    "follow": (rt.follow, OF_A_STEP | {"model": MODEL, "plan": "zoo:resnet50_b16_0.8"}),
    "explain": (rt.explain, OF_EXPLAIN | {"gpu": "h100", "budget": "1GB", "implementations": "default"}),
    "compare": (rt.compare, OF_EXPLAIN | {"gpus": ["h100"], "prices": None}),
}  # fmt: skip


class Captured(Exception):
    """The arguments were accepted."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_argument_is_one_line(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(*_: Any, **__: Any) -> None:
        raise Captured

    monkeypatch.setattr(_rematerialize, "captured_step", capture)
    monkeypatch.setattr(StepFactory, "step", capture)
    function, good = FUNCTIONS[name]
    told = list[tuple[str, Any, str]]()
    for argument in good:
        accepted = 0
        for wrong in (*OF_ANY_KIND, torch.ones(2), torch.ones(())):
            try:
                function(**good | {argument: wrong})
            except Captured:
                accepted += 1
            except remat.RematError as error:
                told.append((argument, wrong, str(error)))
        assert accepted < 15, argument
    for argument, wrong, line in told:
        is_own_path = argument in ("plan", "cache_folder") and isinstance(wrong, str)
        assert is_own_path or (line.isprintable() and len(line) < 2000), (argument, line)
    with pytest.raises(Captured):
        function(**good)
