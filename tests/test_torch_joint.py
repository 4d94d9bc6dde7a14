"""`rematerialize(implementations=...)`: other implementations chosen by a plan and executed by PyTorch."""

import json
import random
from dataclasses import replace

import pytest
import torch
from helpers import refused
from torch import nn
from torch_helpers import assert_same, step

import remat
import remat.torch as rt
from remat import Plan
from remat.execution import StepPlan
from remat.search.choices import Choices
from remat.torch.planning.capturing import captured_step
from remat.torch.planning.eager import Eager


class Net(nn.Module):
    """Convolutions with the activations that have other implementations, a pooling layer and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.third = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.LeakyReLU(0.1))
        self.elu, self.norm, self.drop = nn.ELU(), nn.LayerNorm(8), nn.Dropout(0.25)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.second(self.first(x)))
        x = self.elu(self.drop(self.third(x)) + x)
        return self.last(self.norm(x.mean((2, 3))))


X, Y = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 3])
BUDGET = 0.82


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def of_labels(logits: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, Y)


def step_at(module: nn.Module) -> dict[str, torch.Tensor]:
    module.zero_grad()
    return step(module, (X,), of_labels, seed=5)


def assert_near(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> None:
    """Gradients to 1e-4 of the largest number, buffers to 1e-6."""
    scale = max(float(x.abs().max()) for name, x in plain.items() if name.startswith("gradient"))
    for name, x in plain.items():
        if name.startswith(("gradient", "buffer")):
            assert torch.allclose(ours[name], x, atol=1e-4 * scale if name.startswith("gradient") else 1e-6), name


def planned(operators: str, tmp_path, budget: float | str = BUDGET, **options) -> rt.Rematerialized:
    return rt.rematerialize(
        fresh(), (X,), budget, implementations=operators, cost="roofline", gpu="cpu", time_limit_s=3,
        cache_folder=tmp_path / "cache", **options,
    )  # fmt: skip


def captured(operators: str, model: nn.Module | None = None):
    return captured_step(model or fresh(), (X,), {}, Eager(operators))


def test_every_kind_of_implementation_is_attached() -> None:
    step = captured("joint")
    names = {each.name for op in step.graph.operations for each in op.implementations}
    expected = """
        relu_packed relu_in_place hardtanh_from_output hardtanh_packed leaky_relu_from_output elu_from_output
        max_pool2d_offsets max_pool2d_recomputed batch_norm_from_output batch_norm_from_leaky_relu
        layer_norm_from_output dropout_packed dropout_replayed convolution_im2col convolution_im2col_per_sample
        convolution_channels_last
    """
    assert set(expected.split()) <= names
    exact = {each.name for op in captured("exact").graph.operations for each in op.implementations}
    assert "relu_packed" in exact
    assert not exact & {"batch_norm_from_output", "elu_from_output", "convolution_im2col"}
    assert captured("default").graph == step.graph.default()


def test_exact_plans_give_the_bits_of_the_plain_model(tmp_path) -> None:
    module = planned("exact", tmp_path, verify=True)
    assert module.measured_peak_bytes <= 1.001 * module.predicted_peak_bytes
    assert_same(step_at(fresh()), step_at(module))


def test_joint_plans_keep_their_promise_and_run_again_without_a_solver(tmp_path) -> None:
    module = planned("joint", tmp_path, verify=True)
    assert any(module.plan.plan.choices)
    assert module.measured_peak_bytes <= module.budget_bytes
    assert abs(module.measured_peak_bytes / module.predicted_peak_bytes - 1) < 0.03
    assert_near(ours := step_at(module), step_at(fresh()))
    path, other = tmp_path / "plan.json", tmp_path / "other.json"
    module.plan.save(path)
    document = json.loads(path.read_text())
    assert any(len(one) == 3 for one in document["steps"])
    again = rt.rematerialize(fresh(), (X,), plan=path)
    assert again.plan.plan.steps == module.plan.plan.steps
    assert again.plan.implementations == "joint"
    assert (again.predicted_peak_bytes, again.overhead) == (module.predicted_peak_bytes, module.overhead)
    assert_same(step_at(again), ours)
    document["execution"]["implementations"][3] = [["nothing", 1, -1]]
    other.write_text(json.dumps(document))
    with pytest.raises(remat.InvalidPlan, match="names, costs and bytes"):
        rt.rematerialize(fresh(), (X,), plan=other)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> StepPlan:
    """A step with all implementations, which computes nothing again."""
    return planned("joint", tmp_path_factory.mktemp("made"), 1.0).plan


def following(made: StepPlan, plan: Plan) -> rt.Rematerialized:
    plan = replace(made, plan=plan, budget_bytes=None)
    return rt.rematerialize(fresh(), (X,), plan=plan, cost="roofline", gpu="cpu")


@pytest.mark.parametrize("seed", [0, 1])
def test_any_choice_gives_the_gradients(seed: int, made: StepPlan) -> None:
    """Plans drawn at random, so that every implementation is executed, whatever a solver would choose."""
    r, choices, chosen = random.Random(seed), Choices(made.graph), None
    while chosen is None:
        chosen = choices.choose([r.randrange(len(each)) for each in choices.implementations])
    # Everything that can be is computed a second time before the backward pass ends.
    graph = chosen.graph
    first = next(k for k, op in enumerate(graph.operations) if op.is_backward)
    again = [k for k in range(first - 1) if not graph.operations[k].run_once]
    order = [*range(first), *(again if seed % 2 else ()), *range(first, len(graph))]
    plan = chosen.lift(Plan.from_order(graph, order))
    assert any(plan.choices)
    assert_near(step_at(following(made, plan)), step_at(fresh()))


def test_bad_operators_are_refused_in_one_line() -> None:
    for message, options in (
        ("joint", {"implementations": "joimt"}),
        ("backend='eager'", {"implementations": "joint", "backend": "inductor"}),
    ):
        with refused(message):
            rt.rematerialize(fresh(), (X,), 0.8, **options)


def test_weights_too_small_to_invert_keep_the_default() -> None:
    model = fresh()
    nn.init.zeros_(model.second[1].weight)
    graph = captured("joint", model).graph
    norms = [op for op in graph.operations if "batch_norm_legit" in op.kind]
    offered = [any(each.name == "batch_norm_from_output" for each in op.implementations) for op in norms]
    assert offered == [True, False, True]


def test_training_goes_on_when_a_weight_comes_near_zero(tmp_path, made) -> None:
    choices, name = Choices(made.graph), "batch_norm_from_output"
    names = [[each.name for each in of_operation] for of_operation in choices.implementations]
    chosen = choices.choose([each.index(name) if name in each else 0 for each in names])
    plan = chosen.lift(Plan.from_order(chosen.graph, range(len(chosen.graph))))
    assert name in plan.choices
    module, plain = following(made, plan), fresh()
    for model in (module, plain):
        step_at(model)
        with torch.no_grad():
            for norm in (model.first[1], model.second[1], model.third[1]):
                norm.weight[0] = 1e-14
    with pytest.warns(UserWarning, match="implementations='exact'"):
        ours = step_at(module)
    assert_same(step_at(plain), ours)
    # such a plan does not fit these weights any more, and says so
    module.plan.save(tmp_path / "plan.json")
    for given in (module.plan, tmp_path / "plan.json"):
        with pytest.raises(remat.InvalidPlan, match="inverted"):
            rt.rematerialize(plain, (X,), plan=given)
