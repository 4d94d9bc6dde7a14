"""Limits that the guide names: what is refused, what stays as it is, and how near the rest is."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers import refused

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch_helpers import MARKS, Applies, Between, autocast, rematerialize, squares, step  # noqa: E402

from remat.torch.measuring.measure import difference_of_steps  # noqa: E402

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]


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


def test_the_plan_is_that_of_the_autocast_in_force() -> None:
    x = torch.randn(6, 16)
    plain = rematerialize(Between(), (x,)).plan
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = rematerialize(Between(), (x,)).plan
    kinds = [{operation.kind for operation in plan.graph.operations} for plan in (plain, cast)]
    assert ["aten._to_copy" in each for each in kinds] == [False, True]


class Doubled(Between):
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2 + self.a(x)


def test_other_methods_are_the_plain_models() -> None:
    x = torch.randn(6, 16)
    planned = rematerialize(Doubled(), (x,))
    assert torch.equal(planned.twice(x), planned.model.twice(x))
    assert not planned._step.compiled
    planned(x)
    assert planned._step.compiled


def test_steps_in_another_thread() -> None:
    args = (torch.randn(6, 16),)
    planned, found = rematerialize(Between(), args), list[float]()

    def compare() -> None:
        found.append(difference_of_steps(planned.model, planned, args, {}, "cpu"))

    compare()
    other = threading.Thread(target=compare)
    other.start()
    other.join()
    assert found == [0, 0]


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
    plain = make()
    with context():
        ours = rematerialize(copy.deepcopy(plain), (x,))
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
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)[:, None]
            return F.scaled_dot_product_attention(x, x, x)

    before, promised = torch.get_num_threads(), []
    try:
        for n in (1, 4):
            torch.set_num_threads(n)
            promised.append(rematerialize(Attends(), (torch.randn(2, 64, 16),)).predicted_peak_bytes)
    finally:
        torch.set_num_threads(before)
    assert promised[0] < promised[1]
