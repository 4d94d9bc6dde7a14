"""Models as people have them: from transformers, with logging, in loops of libraries, that see that they are traced."""

from __future__ import annotations

import copy
import importlib
import inspect
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import pytest
from helpers import refused

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import MARKS, Between, assert_same_steps, rematerialize, squares  # noqa: E402

import remat.torch as rt  # noqa: E402

pytestmark = MARKS
ROWS = (torch.linspace(-1, 1, 64).view(4, 16),)
log = logging.getLogger("a.model")

SCRIPT = """
import json, torch, warnings
import remat.torch as rt
from torch._dynamo.utils import counters
warnings.simplefilter("ignore")  # of costs
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16))
x = torch.randn(8, 16)
planned = rt.rematerialize(model, (x,), 1.0, backend="inductor", cost="flops", time_limit_s=1)
planned(x).sum().backward()
print(json.dumps(counters["inductor"]))
"""
SOME = ("gpt2", "qwen3", "mixtral")
OTHERS = ("bart", "swin", "mistral", "bert", "falcon_mamba", "wav2vec2", "resnet")  # experiment=coverage has all


def same_bits(model: nn.Module, *args: torch.Tensor) -> None:
    assert_same_steps(model, rematerialize(copy.deepcopy(model), args, 1.0), *args)


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
@pytest.mark.filterwarnings("ignore")
def test_architectures_of_transformers_have_the_plain_bits(name: str) -> None:
    pytest.importorskip("transformers")
    from experiments.steps.training import MASKS, covered

    masks = MASKS if name == "qwen3" else ()  # heads that share keys: a mask changes their kernel
    (row,) = covered(name, 1.0, "flops", masks)
    assert row["trains"], row
    assert row["difference"] == 0
    assert row["masks"] == dict.fromkeys(masks, 0)
    assert row["recomputed"] > 0


def test_messages_and_ranges_do_not_stop_a_capture() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        log.info("a step of %s", x.shape)
        logging.debug("more")
        warnings.warn("mind the step", stacklevel=2)
        if log.isEnabledFor(logging.DEBUG):
            x = x + 1
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same_bits(Between(between), *ROWS)


def test_a_level_that_a_model_depends_on_is_not_guessed() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if log.getEffectiveLevel() < 5 else x

    with refused(r"one graph: .*Logger"):
        rematerialize(Between(between), ROWS)


def test_where_it_reads_values_it_hears_the_truth_and_nowhere_else() -> None:
    """Both branches of the first question give the same; those of the second one do not."""

    def between(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 1e9).any()):
            x = x - 1
        return x * 3 if torch.compiler.is_compiling() else x

    same_bits(Between(between), *ROWS)


def test_verify_says_by_how_much_a_traced_model_differs() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x if not torch.compiler.is_compiling() and bool((x > -1e9).all()) else x * 1.5

    planned = rematerialize(Between(between), ROWS, verify=True)
    assert planned.plan.difference > 0.01
    assert f"differs from the plain step by up to {planned.plan.difference:.1e}" in str(planned.plan)
    assert "loss, gradients and buffers have the bits" in str(rematerialize(Between(), ROWS, verify=True).plan)


def test_branches_on_constants_are_followed() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        if (torch.arange(x.shape[0]).cumsum(0)[-1] == 6) and not torch.ones(3).bool().logical_not().any():
            return x * 2
        return x

    same_bits(Between(between), *ROWS)
    same_bits(Between(between), torch.randn(5, 16))


def test_the_module_looks_like_the_model() -> None:
    model = Between()
    planned = rematerialize(model, ROWS)
    assert isinstance(planned, Between)
    assert isinstance(planned, rt.Rematerialized)
    assert type(planned) is rt.Rematerialized
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert isinstance(copy.deepcopy(planned), Between)


def test_a_module_that_nobody_holds_is_freed_at_once() -> None:
    planned = weakref.ref(rematerialize(Between(), ROWS))
    assert planned() is None


def test_sample_arguments_may_have_no_contents() -> None:
    planned = rematerialize(Between(), (torch.empty(4, 16, device="meta"),), verify=True)
    assert planned.plan.fingerprint.inputs == "float32[4, 16]"
    squares(planned(*ROWS)).backward()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_follows_its_plan(fullgraph: bool) -> None:
    planned = rematerialize(Between(), ROWS)
    squares(torch.compile(planned, backend="aot_eager", fullgraph=fullgraph)(*ROWS)).backward()
    assert planned._step.compiled


def test_a_compiled_step_around_the_module_follows_its_plan_or_says_what_to_do() -> None:
    planned = rematerialize(Between(), ROWS)
    torch.compile(lambda x: squares(planned(x)), backend="aot_eager")(*ROWS).backward()
    assert planned._step.compiled
    with pytest.raises(Exception, match="compiles its own steps: leave it out"):
        torch.compile(lambda x: squares(planned(x)), backend="aot_eager", fullgraph=True)(*ROWS)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_finds_its_own_code_again_and_is_quiet(tmp_path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1],
            env=environment | {"PYTHONPATH": str(Path(__file__).parents[1])},
        )  # fmt: skip
        assert done.stderr == ""
        found.append(json.loads(done.stdout))
    assert [each.get("fxgraph_cache_hit", 0) for each in found] == [0, 2]


@pytest.mark.parametrize("library", ["transformers", "accelerate", "lightning"])
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_ten_steps_with_checkpoints_and_evaluation_have_the_plain_losses(library, monkeypatch, caplog) -> None:
    pytest.importorskip(library)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
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
