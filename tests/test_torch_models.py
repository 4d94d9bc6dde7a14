"""Models as people have them: from transformers, with logging, that compute differently while they are traced."""

from __future__ import annotations

import copy
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

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import squares  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat.errors import InvalidInput  # noqa: E402

pytestmark = [pytest.mark.usefixtures("warm_search", "torch_cache", "torch_seed")]
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


def rematerialize(model: nn.Module, args: tuple[torch.Tensor, ...], **options) -> rt.Rematerialized:
    quick = {"budget": 1.0, "cost": "flops", "time_limit_s": 0.5, "strategy": "search"}
    return rt.rematerialize(model, args, **{**quick, **options})


def same_bits(model: nn.Module, *args: torch.Tensor, **options) -> rt.Rematerialized:
    """The model under a plan, after a step whose results are those of the plain model."""
    planned = rematerialize(copy.deepcopy(model), args, **options)
    for each in (model, planned):
        torch.manual_seed(1)
        squares(each(*args)).backward()
    for ours, plain in zip(planned.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, plain.grad)
    return planned


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


class Blocks(nn.Module):
    """Layers with something that a test adds between them."""

    def __init__(self, between=lambda x: x) -> None:
        super().__init__()
        self.between, self.first, self.last = between, nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.between(self.first(x))))


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
        same_bits(Blocks(between), torch.randn(4, 16))


def test_a_level_that_a_model_depends_on_is_not_guessed() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if log.getEffectiveLevel() < 5 else x

    with pytest.raises(InvalidInput, match=r"one graph: .*Logger"):
        rematerialize(Blocks(between), (torch.randn(4, 16),))


def test_a_model_does_not_notice_that_it_is_traced() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if torch.compiler.is_compiling() else x

    same_bits(Blocks(between), torch.randn(4, 16))


def test_where_it_reads_values_it_hears_the_truth_and_nowhere_else() -> None:
    """Both branches of the first question give the same; those of the second one do not."""

    def between(x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 1e9).any()):
            x = x - 1
        return x * 3 if torch.compiler.is_compiling() else x

    same_bits(Blocks(between), torch.randn(4, 16))


def test_verify_says_by_how_much_a_traced_model_differs() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        return x if not torch.compiler.is_compiling() and bool((x > -1e9).all()) else x * 1.5

    planned = rematerialize(Blocks(between), (torch.randn(4, 16),), verify=True)
    assert planned.plan.difference > 0.01
    assert f"differs from the plain step by up to {planned.plan.difference:.1e}" in str(planned.plan)
    assert "loss, gradients and buffers have the bits" in str(
        rematerialize(Blocks(), (torch.randn(4, 16),), verify=True).plan
    )


def test_branches_on_constants_are_followed() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        if (torch.arange(x.shape[0]).cumsum(0)[-1] == 6) and not torch.ones(3).bool().logical_not().any():
            return x * 2
        return x

    same_bits(Blocks(between), torch.randn(4, 16))
    same_bits(Blocks(between), torch.randn(5, 16))


def written(x: torch.Tensor) -> torch.Tensor:
    marks = torch.zeros(4)
    marks[0] = x.sum().detach()
    return x * 2 if marks.sum() > 0 else x


def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.rand(()) > 0.5 else x


def summed(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize("between", [written, drawn, summed])
def test_branches_on_anything_else_are_refused_with_their_line(between) -> None:
    lines, first = inspect.getsourcelines(between)
    model, x, state = Blocks(between), torch.randn(4, 16), torch.get_rng_state()
    where = rf"one graph: Data-dependent .*, at line {first + len(lines) - 1} of .*{__name__}.py"
    with pytest.raises(InvalidInput, match=where):
        rematerialize(model, (x,))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_gradient_asked_for_an_intermediate_is_left_out() -> None:
    class Asks(Blocks):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            x.requires_grad = True
            return super().forward(x)

    same_bits(Asks(), torch.randn(4, 16))


def test_what_a_first_call_sets_up_is_set_up_before_the_capture() -> None:
    class Lazy(Blocks):
        ready = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.ready:
                inspect.currentframe()  # cannot be traced
                self.ready = True
            return super().forward(x)

    same_bits(Lazy(), torch.randn(4, 16))


def test_the_module_looks_like_the_model() -> None:
    model = Blocks()
    planned = rematerialize(model, (torch.randn(4, 16),))
    assert isinstance(planned, Blocks)
    assert isinstance(planned, rt.Rematerialized)
    assert type(planned) is rt.Rematerialized
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert isinstance(copy.deepcopy(planned), Blocks)


def test_a_module_that_nobody_holds_is_freed_at_once() -> None:
    planned = weakref.ref(rematerialize(Blocks(), (torch.randn(4, 16),)))
    assert planned() is None


def test_sample_arguments_may_have_no_contents() -> None:
    planned = rematerialize(Blocks(), (torch.empty(4, 16, device="meta"),), verify=True)
    assert planned.plan.fingerprint.inputs == "float32[4, 16]"
    squares(planned(torch.randn(4, 16))).backward()


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_compiled_module_follows_its_plan(fullgraph: bool) -> None:
    x = torch.randn(4, 16)
    planned = rematerialize(Blocks(), (x,))
    squares(torch.compile(planned, backend="aot_eager", fullgraph=fullgraph)(x)).backward()
    assert planned._step.compiled


def test_a_compiled_step_around_the_module_follows_its_plan_or_says_what_to_do() -> None:
    x = torch.randn(4, 16)
    planned = rematerialize(Blocks(), (x,))
    torch.compile(lambda x: squares(planned(x)), backend="aot_eager")(x).backward()
    assert planned._step.compiled
    with pytest.raises(Exception, match="compiles its own steps: leave it out"):
        torch.compile(lambda x: squares(planned(x)), backend="aot_eager", fullgraph=True)(x)


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
