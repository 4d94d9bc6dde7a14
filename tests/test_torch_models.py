"""Models as people have them: from transformers, with logging, in loops of libraries, that see that they are traced."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import ROOT, refused, run_python
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from torch_helpers import (
    MARKS,
    Applies,
    Between,
    assert_same_steps,
    autocast,
    both,
    rematerialize,
    rows,
    squares,
    step,
)

import remat.torch as rt
from remat.torch.internals.operators import FakeTensorMode
from remat.torch.measuring.measure import difference_of_steps

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]
ROWS = (torch.linspace(-1, 1, 64).view(4, 16),)
log = logging.getLogger("a.model")


def same_bits(model: nn.Module, *args: torch.Tensor) -> None:
    assert_same_steps(model, rematerialize(copy.deepcopy(model), args, 1.0), *args)


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mixtral"])  # experiment=coverage has all
@pytest.mark.filterwarnings("ignore")
def test_architectures_of_transformers_have_the_plain_bits(name: str) -> None:
    pytest.importorskip("transformers")
    from experiments.steps.training import MASKS, covered

    masks = MASKS[1:2] if name == "qwen3" else ()  # heads that share keys: a mask changes their kernel
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


class Strided(nn.Linear):
    """With a tensor that is no buffer, as YOLO's heads have, and a bias that is never trained."""

    def __init__(self) -> None:
        super().__init__(16, 16)
        self.stride = torch.ones(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.stride

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.stride = fn(self.stride)
        return self

    def requires_grad_(self, requires_grad: bool = True):
        super().requires_grad_(requires_grad)
        self.bias.requires_grad_(False)
        return self


def test_what_a_model_makes_of_the_modules_methods_holds_for_the_planned_one() -> None:
    planned = rematerialize(Strided(), ROWS)
    assert planned.requires_grad_(True).to(torch.bfloat16) is planned
    assert not planned.bias.requires_grad
    assert planned.stride.dtype is torch.bfloat16
    assert planned(torch.randn(8, 16, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert copy.deepcopy(planned).double().stride.dtype is torch.float64
    assert planned.stride.dtype is torch.bfloat16


def test_planning_leaves_gradients_that_are_held() -> None:
    model = Between()
    squares(model(*ROWS)).backward()
    before = [(p.grad, p.grad.clone()) for p in model.parameters()]
    rematerialize(model, ROWS, verify=True, accumulate=True)
    for p, (gradient, content) in zip(model.parameters(), before, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, content)


def test_a_planned_container_is_changed_as_the_model_is() -> None:
    planned = rematerialize(nn.Sequential(nn.Linear(16, 16), nn.Tanh()), ROWS)
    assert (len(planned), bool(planned), isinstance(planned[1], nn.Tanh), len([*planned])) == (2, True, True, 2)
    planned[1] = nn.Linear(16, 2)
    assert planned(torch.randn(8, 16)).shape == (8, 2)
    del planned[1]
    assert len(planned.model) == 1


def test_branches_on_constants_are_followed() -> None:
    def between(x: torch.Tensor) -> torch.Tensor:
        if (torch.arange(x.shape[0]).cumsum(0)[-1] == 6) and not torch.ones(3).bool().logical_not().any():
            return x * 2
        return x

    same_bits(Between(between), *ROWS)
    same_bits(Between(between), torch.randn(5, 16))


def test_the_module_looks_like_the_model() -> None:
    model = Between()
    planned = rematerialize(model, (torch.empty(4, 16, device="meta"),), verify=True)  # arguments without contents
    squares(planned(*ROWS)).backward()
    assert planned.plan.fingerprint.inputs == "float32[4, 16]"
    assert isinstance(planned, Between)
    assert isinstance(planned, rt.Rematerialized)
    assert type(planned) is rt.Rematerialized
    assert inspect.signature(planned.forward) == inspect.signature(model.forward)
    assert isinstance(copy.deepcopy(planned), Between)
    reference = weakref.ref(rematerialize(Between(), ROWS))
    assert reference() is None  # freed at once


def test_a_compiled_module_or_step_around_it_follows_its_plan_or_says_what_to_do() -> None:
    for compiled in (
        lambda planned: torch.compile(planned, backend="aot_eager"),
        lambda planned: torch.compile(lambda x: planned(x), backend="aot_eager"),
    ):
        planned = rematerialize(Between(), ROWS)
        squares(compiled(planned)(*ROWS)).backward()
        assert planned._step.compiled
    with pytest.raises(Exception, match="compiles its own steps: leave it out"):
        torch.compile(lambda x: squares(planned(x)), backend="aot_eager", fullgraph=True)(*ROWS)


def test_a_module_compiled_with_fullgraph_follows_its_plan_in_a_process_that_compiled_nothing_else() -> None:
    printed = run_python(
        """
        import torch, torch_helpers
        for hooked in (False, True):
            planned = torch_helpers.rematerialize(torch_helpers.Between(), (torch.ones(4, 16),))
            if hooked:
                planned.register_forward_hook(lambda *_: None)
            compiled = torch.compile(planned, backend="aot_eager", fullgraph=True)
            torch_helpers.squares(compiled(torch.ones(4, 16))).backward()
            print(len(planned._step.compiled))
        """,
        PYTHONPATH=os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
    )
    assert printed.split() == ["1", "1"]


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


# Limits that the guide names


def test_ctc_loss_is_refused() -> None:
    def lost(x: Tensor, labels: Tensor, sizes: Tensor) -> Tensor:
        return x * F.ctc_loss(x.log_softmax(-1)[:, None].expand(-1, 2, -1), labels, 6 + 0 * sizes, sizes)

    args = torch.randn(6, 8), torch.ones(2, 3, dtype=torch.int64), torch.full((2,), 3)
    with refused(rf"one graph: .*ctc_loss.* of {re.escape(__file__)}"):
        rematerialize(Between(lost, 8), args)


def test_random_numbers_that_are_not_pytorchs() -> None:
    """Dynamo would replace NumPy's by PyTorch's, and repeat those of Python's generators."""
    own, x = random.Random(1), torch.randn(6, 8)
    for between in (
        lambda x: x + torch.from_numpy(np.random.rand(8).astype(np.float32)),  # noqa: NPY002
        lambda x: x * np.random.randint(1, 5),  # noqa: NPY002
        lambda x: x * own.random(),
        lambda x: x * random.random(),
        lambda x: x * random.choice([1, 2]),
    ):
        with refused(rf"one graph: .* of {re.escape(__file__)}"):
            rematerialize(Between(between, 8), (x,))
    model, found = Between(lambda x: x * random.uniform(1, 2), 8), []  # one of those that it reads anew in each step
    for each in (rematerialize(model, (x,)), model):
        random.seed(1)
        found.append([each(x) for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_a_model_elsewhere_is_refused() -> None:
    with refused("move both to the CPU or to one CUDA device"):
        rematerialize(Between().to("meta"), (torch.randn(6, 16),))


class Doubled(Between):
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2 + self.a(x)


def test_other_methods_are_the_plain_models() -> None:
    (x,) = rows(6, 16)
    planned = rematerialize(Doubled(), (x,))
    with FlopCounterMode(display=False):  # a planned step refuses it
        assert torch.equal(planned.twice(x), planned.model.twice(x))
        with refused("FlopCounterMode"):
            planned(x)


def test_two_threads_may_begin_at_once() -> None:
    """What is replaced in PyTorch while a step is captured is so for all threads, and is put back."""
    (x,), dispatch = rows(2, 3, 8, 8), FakeTensorMode.dispatch
    args, meet, found = (x.to(memory_format=torch.channels_last),), threading.Barrier(2), list[tuple[Any, ...]]()

    def run() -> None:
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 3))
        plain = copy.deepcopy(model.to(memory_format=torch.channels_last))
        meet.wait()
        ours = rematerialize(model, args)
        found.append((plain, ours, difference_of_steps(plain, ours, args, {}, "cpu")))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [difference for *_, difference in found] == [0, 0]
    assert [difference_of_steps(plain, ours, args, {}, "cpu") for plain, ours, _ in found] == [0, 0]  # in this one
    assert FakeTensorMode.dispatch is dispatch


# Last bits


def in_two_regions(self: Any, x: Tensor) -> Tensor:
    with autocast():
        h = self.a(x)
    h = torch.tanh(h.float())
    with autocast():
        return self.a(h)


def cast_by_hand_too(self: Any, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(self.a(torch.tanh(self.a(x)))), self.a.weight.to(torch.bfloat16))


def turned(output: Tensor) -> Tensor:
    return output.t().contiguous().square().mean()


DIFFERENT: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {  # name -> (model, context, loss)
    "prod": (lambda: Between(lambda h: h * torch.prod(h, 1, keepdim=True)), contextlib.nullcontext, squares),
    "addcdiv": (
        lambda: Between(lambda h: torch.addcdiv(h, h, h.abs() + 1, value=0.3)), contextlib.nullcontext, squares,
    ),
    "bilinear": (
        lambda: Applies(lambda self, x: self.bilinear(torch.tanh(x), x), 0, bilinear=nn.Bilinear(16, 16, 8)),
        autocast, squares,
    ),
    "regions": (lambda: Applies(in_two_regions), contextlib.nullcontext, squares),
    "by hand": (lambda: Applies(cast_by_hand_too), autocast, squares),
    "bidirectional": (
        lambda: Applies(lambda self, x: self.rnn(x)[0], 0, rnn=nn.GRU(16, 8, bidirectional=True)),
        autocast, squares,
    ),
    "layout": (Between, contextlib.nullcontext, turned),
}  # fmt: skip


CAST = ("bilinear", "regions", "by hand", "bidirectional")


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs_in_last_bits_is_near(name: str) -> None:
    """A case that no longer differs leaves the guide's list."""
    make, context, loss_of = DIFFERENT[name]
    x = torch.randn(*((8, 4, 16) if name == "bidirectional" else (40, 16)), requires_grad=name == "bidirectional")
    with context():
        plain, ours = both(make(), (x,))
    differs = False
    for seed in range(3):
        plain.zero_grad()
        ours.zero_grad()
        theirs, mine = (step(each, (x,), loss_of, seed, context) for each in (plain, ours))
        assert theirs.keys() == mine.keys()
        for one, other in zip(theirs.values(), mine.values(), strict=True):
            differs |= not torch.equal(one, other)
            nearest = {"rtol": 0.1, "atol": 0.01} if name in CAST else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(one, other, **nearest)
    assert differs


# Memory


def test_a_kernel_needs_more_with_more_threads() -> None:
    def attends(self: Any, x: Tensor) -> Tensor:
        x = self.a(x)[:, None]
        return F.scaled_dot_product_attention(x, x, x)

    promised = []
    for n in (1, 4):
        torch.set_num_threads(n)
        promised.append(rematerialize(Applies(attends), rows(2, 64, 16)).predicted_peak_bytes)
    assert promised[0] < promised[1]


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


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_inductor_finds_its_own_code_again_and_is_quiet(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, check=True, cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.stderr == ""
        found.append(json.loads(done.stdout))
    assert [each.get("fxgraph_cache_miss", 0) > 0 for each in found] == [True, False]
    assert found[1]["fxgraph_cache_hit"] > 0
