"""A plan of one length carries to others: within a moment, within the budget, with the plain model's bits."""

from __future__ import annotations

import copy
import logging

import pytest
from helpers import refused

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_helpers import MARKS, assert_same_steps, squares  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat import simulate  # noqa: E402
from remat.cost import load_gpu  # noqa: E402
from remat.graph import Graph, Operation, Value, Work  # noqa: E402
from remat.torch.measuring import carried  # noqa: E402
from remat.torch.planning.planner import there_before  # noqa: E402

pytestmark = MARKS
WIDTH = 32


def model() -> nn.Module:
    return nn.Sequential(
        *(nn.TransformerEncoderLayer(WIDTH, 4, 64, 0.1, batch_first=True, norm_first=True) for _ in range(2))
    )


def sentences(length: int) -> torch.Tensor:
    return torch.randn(8, length, WIDTH)


def test_other_lengths_keep_the_budget_and_the_bits_without_a_pause(caplog) -> None:
    plain = model()
    planned = rt.rematerialize(copy.deepcopy(plain), (sentences(64),), 0.6, cost="flops", time_limit_s=2)
    budget = planned.budget_bytes
    with caplog.at_level(logging.WARNING, logger="remat"):
        for length in (60, 40, 10, 70):
            x = sentences(length)
            assert_same_steps(plain, planned, x)
            (plan,) = planned.prepare((x,))
            assert plan.added_s
            assert plan.strategy == ("from another shape" if plan.recomputed else "fits as it is")
            assert simulate(plan.graph, plan.plan).peak_bytes == plan.peak_bytes <= budget
            planned.zero_grad()
            loss_outside = 3 * 4 * x.numel()  # which the plan allows
            peak = rt.measured_peak(lambda x=x: squares(planned(x)).backward())
            assert there_before(plan) + peak <= max(budget, plan.peak_bytes) + loss_outside
            assert plan.recomputed or length < 60
    assert not [record for record in caplog.records if record.name == "remat"]


def test_a_length_that_cannot_fit_is_refused() -> None:
    planned = rt.rematerialize(model(), (sentences(16),), 0.8, cost="flops", time_limit_s=1)
    with refused(r"no plan of 'Sequential' within .* the budget was given for"):
        planned(sentences(200))


def graph_of(size: int, workspace_bytes: int, cost: int) -> Graph:
    work = Work(flops=10**6 * size, bytes_moved=10**6 * size, signature="{}")
    op = Operation("a", "aten.mm", (), (0,), cost, workspace_bytes, work=work)
    return Graph("g", (op,), (Value("v", size),), cost_unit="ns")


def test_costs_and_workspaces_are_scaled(monkeypatch, tmp_path) -> None:
    known, gpu = graph_of(4, 100, 1000), load_gpu("cpu")
    (half,), (twice,) = (carried.scaled_costs(known, graph_of(n, 0, 0), gpu) for n in (2, 8))
    assert 400 < half < 700  # a launch does not shrink
    assert 1500 < twice < 2100
    monkeypatch.setattr(carried, "profiler_is_on", lambda: True)  # nothing can be measured
    monkeypatch.setattr(
        carried, "profile_workspaces", lambda graph, *_: ([op.workspace_bytes for op in graph.operations], {})
    )
    assert carried.workspaces(known, graph_of(8, 0, 0), tmp_path, "cpu") == [200]
    assert carried.workspaces(known, graph_of(2, 0, 0), tmp_path, "cpu") == [100]  # never less


def test_workspaces_are_measured_here_and_leave_random_numbers_alone(tmp_path, monkeypatch) -> None:
    step = rt._rematerialize.captured_step(model(), (sentences(8),), {}, rt._rematerialize.Eager())
    in_child, _ = carried.profile_workspaces(step.graph, tmp_path / "child", "cpu")
    monkeypatch.setattr(carried, "MEASURE_S", 60)
    state = torch.get_rng_state()
    here = carried.workspaces(step.graph, step.graph, tmp_path / "here", "cpu")
    assert torch.equal(state, torch.get_rng_state())
    assert here == in_child
    assert any(here)
