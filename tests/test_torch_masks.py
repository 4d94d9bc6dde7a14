"""Models that leave out a mask which masks nothing, as eager mode does by reading its values."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch_helpers import MARKS, Between, assert_same_steps, both, rematerialize

from remat.torch.measuring.measure import peak_of_step
from remat.torch.measuring.plain import plain_step
from remat.torch.planning import eager

pytestmark = MARKS
BATCH, LENGTH, HEADS, KEY_HEADS, WIDTH = 3, 10, 4, 2, 8


class Attention(nn.Module):
    """Attention in which several heads share keys, in its own way if there is no mask; as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, HEADS * WIDTH), nn.Linear(32, KEY_HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, 32)

    def forward(self, x: Tensor, mask: Tensor | None = None, other: Tensor | None = None) -> Tensor:
        if mask is not None and not torch.compiler.is_compiling() and mask.bool().sum() == mask.numel():
            mask = None
        if other is not None and (other == 1).all():
            x = x * 2
        query, key = (f(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for f in (self.query, self.key))
        if mask is None:
            h = F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        else:
            key = key.repeat_interleave(HEADS // KEY_HEADS, 1)
            h = F.scaled_dot_product_attention(query, key, key, mask.bool()[:, None, None])
        return self.out(h.transpose(1, 2).flatten(2))


def masks() -> dict[str, Tensor]:
    ones = torch.ones(BATCH, LENGTH, dtype=torch.long)
    left, right = ones.clone(), ones.clone()
    left[1, :3] = right[2, -4:] = 0
    return {"ones": ones, "left": left, "right": right}


def hidden(length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, 32)


def test_each_kind_of_mask_has_the_plain_bits_and_one_plan(caplog: pytest.LogCaptureFixture) -> None:
    x, first = hidden(), "left"
    plain, ours = both(Attention(), (x, masks()[first]))
    plans = ours.prepare(*((x, mask) for mask in masks().values()))
    with caplog.at_level(logging.WARNING, "remat"):
        for name in (first, "ones", "left", "right", "ones", "left"):
            assert_same_steps(plain, ours, x, masks()[name])
    assert len({id(plan) for plan in (*plans, *ours.prepare(*((x, mask) for mask in masks().values())))}) == 2
    assert "pauses" not in caplog.text
    (plan,) = ours.prepare((x.to("meta"), masks()["ones"].to("meta")))
    assert plan is ours.plan  # without contents it counts as padding


def test_a_mask_of_another_kind_is_planned_when_it_comes(caplog: pytest.LogCaptureFixture) -> None:
    x = hidden()
    plain, ours = both(Attention(), (x, masks()["ones"]))
    assert_same_steps(plain, ours, x, masks()["ones"])
    assert "pauses" not in caplog.text
    assert_same_steps(plain, ours, x, masks()["left"])
    assert "values of a mask" in caplog.text
    ones = torch.ones(BATCH, LENGTH + 1, dtype=torch.bool)
    assert_same_steps(plain, ours, hidden(LENGTH + 1), ones)  # other shapes
    assert_same_steps(plain, ours, x)  # and no mask


def test_masks_are_told_apart_by_their_names() -> None:
    x, ones, left = hidden(), masks()["ones"], masks()["left"]
    plain, ours = both(Attention(), (x,), sample_kwargs={"mask": ones, "other": left})
    for mask, other in ((ones, left), (left, ones)):
        assert_same_steps(plain, ours, x, mask=mask, other=other)
        assert_same_steps(plain, ours, x, other=other, mask=mask)
    assert_same_steps(plain, ours, x, left, ones)


@pytest.mark.usefixtures("one_thread")
def test_the_plain_peak_is_that_of_the_mask_at_hand() -> None:
    model, x = Attention(), hidden()
    peaks = {}
    for name, mask in masks().items():
        followed = plain_step(model, (x, mask), {})
        assert followed.is_eager
        peaks[name] = followed.peak_bytes({})
        assert peaks[name] == pytest.approx(peak_of_step(model, (x, mask), {}, "cpu"), rel=0.05)
    assert 1.1 * peaks["ones"] < peaks["left"] == peaks["right"]


def of_an_argument(x: Tensor, mask: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(mask)
    return x * 2 if (mask > 0).all() else x


def of_a_view(x: Tensor, mask: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    made = mask.clone()
    seen = made.view(-1)
    write(made)
    return x * 2 if (seen > 0).all() else x


def of_a_mask_whose_part_is_changed(x: Tensor, mask: Tensor) -> Tensor:
    mask[:, :5].zero_()
    return x * 2 if mask.all() else x


def often(x: Tensor, mask: Tensor) -> Tensor:
    for row in mask.flatten():
        if row:
            x = x * 2
    return x


REFUSED = (
    of_a_mask_whose_part_is_changed,
    often,
    lambda x, m: x * 2 if torch.bernoulli(m.float()).all() else x,
    # Ways to write in place; not every name ends with "_".
    partial(of_an_argument, write=lambda m: operator.isub(m.data, -1)),
    partial(of_an_argument, write=lambda m: torch.add(m, 1, out=m)),
    partial(of_an_argument, write=lambda m: F.threshold(m, 1, 1, inplace=True)),
    partial(of_a_view, write=lambda m: operator.iadd(m, 1)),
    partial(of_a_view, write=lambda m: m.__setitem__(slice(None), m + 1)),
)


@pytest.mark.parametrize("between", REFUSED)
def test_branches_on_what_is_drawn_or_changes_are_refused_and_on_all_rows_too(between: Any) -> None:
    with refused(rf"one graph: Data-dependent .*{__name__}.py"):
        rematerialize(Between(between, 32), (hidden(), masks()["ones"]))


def test_a_branch_beside_what_changes_in_place_is_followed() -> None:
    def beside(x: Tensor, mask: Tensor) -> Tensor:
        one_hot = F.one_hot(mask, 2)  # is written in place where it is made
        F.threshold(made := mask.clone(), 1, 1, inplace=True)
        return x * 2 if one_hot[..., 1].all() else x + made.unsqueeze(-1)

    x = hidden()
    plain, ours = both(Between(beside, 32), (x, masks()["left"]))
    for given in masks().values():
        assert_same_steps(plain, ours, x, given)


def test_a_model_that_reads_other_values_is_warned_of_in_each_call_and_followed_once(monkeypatch: Any) -> None:
    plain, given, followed = Attention(), (hidden(), torch.ones(BATCH, LENGTH)), list[Any]()
    monkeypatch.setattr(eager, "plain_step", lambda *a, **k: followed.append(k) or plain_step(*a, **k))
    says = rf"Attention computes differently while it is traced \(line \d+ of .*{__name__}.py"
    for _ in range(2):
        with pytest.warns(UserWarning, match=says):
            rematerialize(plain, given)
    assert len(followed) == 2  # the plain step, and the one that shows how a model computes while it is traced
