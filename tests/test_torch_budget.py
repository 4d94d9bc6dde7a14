"""Plans of PyTorch's activation memory budget: what they save is what PyTorch saves when it compiles the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import refused
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition

import remat
from baselines import _partitioner
from remat import Status, simulate
from remat.errors import UnknownName
from remat.frontends.spec import ModelSpec
from remat.plan import parse_scope
from remat.problem import Problem, SolveOptions
from remat.simulator import plain_peak
from remat.solving.dispatch import new_context
from remat.solving.worker import run_family_isolated
from remat.torch.frontend import graphs as frontend
from remat.torch.inductor import mincut
from remat.torch.internals.aot import min_cut
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = itertools.pairwise((16, 64, 48, 96, 8))
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.LayerNorm(b)) for a, b in widths))

    def forward(self, x: Any) -> Any:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def model() -> Layers:
    return Layers()


X = torch.randn(128, 16)


@pytest.fixture(scope="module")
def step(model: Layers) -> Any:
    return captured_step(model, (X,), {}, Eager(), "layers")


def saved_in(forward: fx.GraphModule, n_outputs: int) -> list[tuple[str, tuple[int, ...]]]:
    """(operator, shape) of the tensors that a forward half saves, without parameters, inputs and their transposes."""
    outputs: Any = forward.graph.find_nodes(op="output")[0].args[0]
    nodes: Iterable[fx.Node] = (node for node in outputs[n_outputs:] if isinstance(node, fx.Node))
    return sorted(
        (str(node.target), tuple(node.meta["val"].shape))
        for node in nodes
        if node.op == "call_function" and node.target is not torch.ops.aten.t.default
    )


@pytest.mark.parametrize("solver", mincut.SOLVERS)
@pytest.mark.parametrize("share", [0.7, 0.2])
def test_the_same_tensors_are_saved_as_by_the_compiler(model: Layers, step: Any, solver: str, share: float) -> None:
    theirs: list[Any] = []

    def partition(module: fx.GraphModule, inputs: Any, **more: Any) -> Any:
        halves = min_cut_rematerialization_partition(module, inputs, **more)
        theirs.append(saved_in(halves[0], more["num_fwd_outputs"]))
        return halves

    settings = {
        "activation_memory_budget": share, "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": "flops", "enable_autograd_cache": False,
    }  # fmt: skip
    torch._dynamo.reset()
    with functorch_config.patch(settings):
        torch.compile(model, backend=aot_autograd(fw_compiler=lambda half, _: half, partition_fn=partition))(X)
    joint = step.training_graph
    forward, _ = min_cut(joint.module, joint.n_forward_outputs, None, share, solver)
    assert saved_in(forward, joint.n_forward_outputs) == theirs[0]
    assert theirs[0]


def test_every_solver_and_estimator_gives_valid_plans(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partitioner, "SHARES", (1.0, 0.6, 0.3))
    graph = step.graph.with_costs([1000 if "gelu" in op.kind else 10 for op in step.graph.operations], "ns")
    frontend.remember(step, graph)
    members = remat.family(graph, "torch_budget", scope="free")
    asked = {(member.parameters["solver"], member.parameters["estimator"]) for member in members}
    assert {solver for solver, _ in asked} <= set(mincut.SOLVERS)
    assert {estimator for _, estimator in asked} == {"flops", "profile"}
    peaks = {simulate(graph, member.plan).peak_bytes for member in members}
    assert min(peaks) < plain_peak(graph)
    orders = [tuple(member.plan.order.tolist()) for member in members]
    assert len({*orders}) == len(orders)
    one = remat.family(graph, "torch_budget", scope="free", solver="dp", estimator="profile")
    both = remat.family(graph, "torch_mincut", scope="free")
    assert [m.plan.steps for m in one] == [m.plan.steps for m in both]
    assert {*(tuple(m.plan.order.tolist()) for m in both)} <= {*orders}


def test_it_needs_a_captured_step() -> None:
    graph = remat.Graph.from_nodes("none", [[], [0]], [1, 1], [1, 1])
    solution = remat.solve(graph, plain_peak(graph), "torch_budget")
    assert solution.status is Status.SKIPPED
    assert "captured with PyTorch" in solution.message
    with pytest.raises(UnknownName, match="ilp"):
        remat.solve(graph, 2, "torch_budget", solver="ipl")


def test_a_worker_captures_the_step_behind_the_graph_of_a_network() -> None:
    spec = ModelSpec("gpt2", "torch", "remat.torch.networks.transformer:gpt2", 2, options={"length": 32, "n_layers": 2})
    graph = frontend.extract(spec)
    graph = graph.with_costs([1 + (op.work.flops or 0) if op.work else 1 for op in graph.operations], "flop")
    context = new_context(Problem(graph, 2**60, parse_scope("staged")), SolveOptions(time_limit_s=60, threads=1))
    family = run_family_isolated(context, "torch_mincut", {}, spec)
    assert family.status is None, family.message
    assert all(context.problem.scope.contains(member.plan.scope) for member in family.members)
    kept = frontend.step_of_spec(spec, graph)
    here = remat.family(graph, "torch_mincut", scope="staged")
    assert [m.plan.steps for m in family.members] == [m.plan.steps for m in here]
    assert len(here) > 1
    assert max(m.cost for m in here) > graph.total_cost  # something is computed again
    assert frontend.step_behind(graph) is kept
    # Another network is not taken for the one behind the graph.
    with refused("another graph now"):
        frontend.step_of_spec(replace(spec, batch_size=3), graph)
    family = run_family_isolated(context, "torch_mincut", {}, replace(spec, batch_size=3))
    assert family.status is Status.FAILED
    assert "another graph now" in family.message
    assert run_family_isolated(context, "torch_mincut", {}, replace(spec, framework="keras")).status is Status.SKIPPED


def test_threads_may_ask_at_once(step: Any) -> None:
    """The portfolio does: it searches in one thread and proves in another."""
    module, n = step.training_graph.module, step.training_graph.n_forward_outputs
    shares = [0.7, 0.5, 0.3, 0.2]
    alone = [saved_in(min_cut(module, n, None, share)[0], n) for share in shares]
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(lambda share: saved_in(min_cut(module, n, None, share)[0], n), shares * 2)] == alone * 2
