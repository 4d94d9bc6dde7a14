"""The output projection with its cross-entropy in chunks of tokens, against PyTorch's plain pair."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch_helpers import needs

import remat.torch as rt
from remat.graph import Graph
from remat.torch.explaining.gpu_kernels import workspace_of_call
from remat.torch.implementations import IMPLEMENTATIONS, logits
from remat.torch.measuring.timing import peak_of
from remat.torch.networks.llama import llama
from remat.torch.step.capture import capture_module
from remat.torch.step.chunked_loss import with_one_call
from remat.torch.step.training_graph import split_graph_of

VOCABULARY, WIDTH, TOKENS = 300, 16, 96
HOW = {"strategy": "search", "cost": "roofline", "time_limit_s": 1, "implementations": "joint"}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1.5e-2}


class Model(nn.Module):
    """A small language model. `loss` makes the scalar of logits [batch, length, vocabulary] and labels."""

    def __init__(self, loss: Any, bias: bool = False, tied: bool = False, autocast: bool = False):
        super().__init__()
        self.tokens, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.tokens.weight
        self.loss, self.autocast = loss, autocast

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            x = self.tokens(ids)
            return self.loss(self.head(x + F.gelu(self.mix(x))), labels)


def cross_entropy(z: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(z.flatten(0, 1), labels.flatten(), **options)


def shifted(z: Tensor, labels: Tensor) -> Tensor:
    """As transformers did until 4.45: the last token predicts nothing."""
    return cross_entropy(z.float()[:, :-1].contiguous(), labels[:, 1:].contiguous())


smoothed = functools.partial(cross_entropy, label_smoothing=0.1)


def summed(z: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(z, labels, reduction="sum", label_smoothing=0.2) / 7


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(VOCABULARY, (4, TOKENS // 4))
    labels = ids.roll(-1, 1)
    labels[0, :5] = -100
    return ids, labels


def calls_of(model: nn.Module) -> int:
    """How many projections with their losses become one call."""
    return with_one_call(capture_module(model, batch(), {}))


def graph_of(model: nn.Module) -> Graph:
    found = capture_module(model, batch(), {})
    with_one_call(found)
    return split_graph_of(found, "step", tuple(model.parameters())).graph


def planned(model: nn.Module, budget: Any, implementations: str = "joint", **options: Any) -> rt.Rematerialized:
    return rt.rematerialize(model, batch(), budget, **{**HOW, "implementations": implementations, **options})


def differences(model: nn.Module, other: nn.Module) -> dict[str, float]:
    """[parameter] largest difference of its gradients, relative to the largest number in them."""
    pairs = zip(model.named_parameters(), other.parameters(), strict=True)
    return {
        name: ((p.grad - q.grad).abs().max() / q.grad.abs().max().clamp_min(1e-30)).item()
        for (name, p), q in pairs
        if p.grad is not None and q.grad is not None
    }


@pytest.mark.parametrize("n_chunks", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_loss_and_gradients_are_those_of_the_plain_pair(n_chunks: int, dtype: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(VOCABULARY, WIDTH), torch.randn(VOCABULARY)
    labels = batch()[1].flatten()
    plain = [t.to(dtype).double().requires_grad_() for t in (x, weight, bias)]  # what the numbers of this type mean
    F.cross_entropy(F.linear(*plain), labels, **options).backward()
    reduction = logits.SUM if options.get("reduction") == "sum" else logits.MEAN
    loss, *gradients = logits.OPERATOR(
        x.to(dtype), weight.to(dtype), bias.to(dtype), labels, [], [], -100, reduction,
        options.get("label_smoothing", 0.0), dtype, [True, True, True], n_chunks,
    )  # fmt: skip
    wanted = F.cross_entropy(F.linear(*plain), labels, **options)
    assert abs(loss.item() / wanted.item() - 1) < TOLERANCE[dtype]
    for made, leaf in zip(gradients, plain, strict=True):
        assert made.dtype == dtype
        assert ((made - leaf.grad).abs().max() / leaf.grad.abs().max()).item() < TOLERANCE[dtype]


def test_sums_of_many_chunks_are_no_less_exact_than_one_product_in_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2048, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    labels = torch.randint(64, (2048,))
    leaf = weight.double().requires_grad_()
    F.cross_entropy(x.double() @ leaf.t(), labels).backward()
    plain = weight.clone().requires_grad_()
    F.cross_entropy((x @ plain.t()).float(), labels).backward()

    def error(gradient: Tensor) -> float:
        return (gradient.double() - leaf.grad).norm().item()

    made = logits.OPERATOR(x, weight, None, labels, [], [], -100, logits.MEAN, 0.0, torch.float32, [1, 1, 0], 64)[2]
    assert error(made) < 1.1 * error(plain.grad)


def test_without_a_label_that_counts_the_loss_is_nan_and_gradients_are_zero() -> None:
    x, weight, labels = torch.randn(8, 4), torch.randn(9, 4), torch.full((8,), -100)
    loss, of_x, of_weight, _ = logits.OPERATOR(
        x, weight, None, labels, [], [], -100, logits.MEAN, 0.0, x.dtype, [True, True, False], 2
    )
    assert loss.isnan()
    assert not of_x.any()
    assert not of_weight.any()
    with pytest.raises(RuntimeError, match="index"):  # as PyTorch's loss
        logits.OPERATOR(x, weight, None, labels - 1, [], [], -100, 1, 0.0, x.dtype, [True, True, False], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n_chunks", [1, 4, 16])
def test_the_rule_for_the_workspace_counts_what_the_call_holds(dtype: Any, n_chunks: int) -> None:
    x, weight, labels = torch.randn(512, 8).to(dtype), torch.randn(4096, 8).to(dtype), torch.zeros(512).long()
    args = (x, weight, None, labels, [], [], -100, 1, 0.0, torch.float32, [True, True, False], n_chunks)
    made, most = peak_of(lambda: logits.OPERATOR(*args), "cpu")
    held = most - sum(t.untyped_storage().nbytes() for t in made)
    assert 0.85 * logits.workspace_bytes(args) <= held <= 1.05 * logits.workspace_bytes(args) + 65536


@pytest.mark.parametrize(
    ("loss", "options", "dtype"),
    [
        (cross_entropy, {"bias": True, "tied": True}, torch.float64),
        (smoothed, {"tied": True}, torch.float32),
        (summed, {"bias": True}, torch.float32),
        (shifted, {"bias": True}, torch.bfloat16),
        (smoothed, {"bias": True, "autocast": True}, torch.float32),
    ],
)
def test_captured_steps_compute_the_same_with_one_call(loss: Any, options: dict[str, Any], dtype: Any) -> None:
    torch.manual_seed(0)
    model, inputs = Model(loss, **options).to(dtype), batch()
    (loss_of_plain := model(*inputs)).mul(0.37).backward()
    found = capture_module(model, inputs, {})
    assert with_one_call(found) == 1
    kinds = {str(node.target) for node in found.module.graph.nodes}
    assert not any("log_softmax" in kind or "nll_loss" in kind for kind in kinds)
    tangent = torch.tensor(0.37, dtype=loss_of_plain.dtype)
    with torch.no_grad():
        outputs = fx.Interpreter(found.module).run(*found.primals, tangent, enable_io_processing=False)
    made, *gradients = outputs
    low = dtype is torch.bfloat16 or bool(options.get("autocast"))
    most = TOLERANCE[torch.bfloat16 if low else dtype]
    assert abs(made.item() / loss_of_plain.item() - 1) < most
    leaves = [(x, grad) for x, grad in zip(found.primals, gradients, strict=True) if x.requires_grad]
    assert {id(x) for x, _ in leaves} == {id(x) for x in model.parameters()}
    for leaf, gradient in leaves:
        assert ((gradient - leaf.grad).abs().max() / leaf.grad.abs().max()).item() < most


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*of gradients are held", "ignore:.*keeps what the plan frees")
@pytest.mark.parametrize(
    ("loss", "options", "dtype"),
    [
        (smoothed, {"tied": True}, torch.float32),
        (cross_entropy, {"tied": True, "bias": True, "autocast": True}, torch.float32),
    ],
)
def test_steps_with_chunks_have_the_plain_gradients_within_less_memory(
    loss: Any, options: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Model(loss, **options).to(dtype)
    plain, inputs = copy.deepcopy(model), batch()
    module = planned(model, 0.45, verify=True)
    assert any(name.startswith("cross_entropy_in_") for name in module.plan.plan.choices)
    assert module.measured_peak_bytes <= module.budget_bytes
    module.plan.save(tmp_path / "plan.json")
    followed = rt.follow(copy.deepcopy(plain), inputs, tmp_path / "plan.json")
    assert followed.plan.plan.choices == module.plan.plan.choices
    for each in (module, followed, plain):
        (made := each(*inputs)).backward(retain_graph=True)
        (made * 0.37).backward()  # adds to the first
        (each(*inputs) * 0.37).backward()
    low = dtype is torch.bfloat16 or bool(options.get("autocast"))
    for each in (model, followed.model):
        assert max(differences(each, plain).values()) < TOLERANCE[torch.bfloat16 if low else dtype]


def test_a_frozen_head_needs_no_gradient_of_its_weight() -> None:
    model = Model(cross_entropy)
    model.head.requires_grad_(False)
    graph = graph_of(model)
    (call,) = (op for op in graph.operations if op.kind == "remat.linear_cross_entropy")
    sizes = sorted(graph.values[v].bytes for v in call.outputs)
    assert sizes == [0, 0, 4, 4 * TOKENS * WIDTH]


LEFT_ALONE = {
    "logits are returned": lambda z, y: (cross_entropy(z, y), z),
    "a metric reads them": lambda z, y: (cross_entropy(z, y), (z.argmax(-1) == y).float().mean()),
    "z-loss": lambda z, y: cross_entropy(z, y) + 1e-4 * z.logsumexp(-1).square().mean(),
    "soft targets": lambda z, y: F.cross_entropy(z.flatten(0, 1), F.one_hot(y.flatten() % 5, VOCABULARY).float()),
    "weights of classes": lambda z, y: cross_entropy(z, y, weight=torch.ones(VOCABULARY)),
    "no reduction": lambda z, y: cross_entropy(z, y, reduction="none").mean(),
    "soft cap": lambda z, y: cross_entropy(z.tanh() * 30, y),
    "scale": lambda z, y: cross_entropy(z * 0.5, y),
    "two losses": lambda z, y: cross_entropy(z, y) + cross_entropy(z, y.roll(1)),
    "half precision": lambda z, y: cross_entropy(z.half(), y),
    "shares of tokens": lambda z, y: F.nll_loss(F.log_softmax(z.flatten(0, 1), 0), y.flatten()),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_uses_of_the_logits_are_left_alone(name: str) -> None:
    assert calls_of(Model(LEFT_ALONE[name])) == 0


def test_every_number_of_chunks_is_offered_for_enough_tokens_only() -> None:
    few = tuple(x[:1, :4] for x in batch())  # less than the gradient of the weight
    assert with_one_call(capture_module(Model(cross_entropy), few, {})) == 0
    module = planned(Model(cross_entropy), 1.0)
    (call,) = (op for op in module.plan.graph.operations if op.kind == "remat.linear_cross_entropy")
    assert [each.name for each in call.implementations] == ["cross_entropy_in_4", "cross_entropy_in_16"]
    assert {f"cross_entropy_in_{n}" for n in (4, 16, 64)} <= set(IMPLEMENTATIONS)
    workspaces = [each.workspace_bytes for each in call.all_implementations]
    assert workspaces == sorted(workspaces, reverse=True)
    assert call.work is not None
    assert workspace_of_call(call.work.signature) == 4 * TOKENS * VOCABULARY


EXPLAINED = {"vocabulary": 2000, "width": 16, "hidden": 32, "n_layers": 2, "n_heads": 2, "length": 96, "batch_size": 2}
BUDGET = 8_000_000


@pytest.mark.long
def test_explain_says_what_chunks_of_the_logits_save() -> None:
    def factory() -> Any:  # without sizes that could grow
        return llama(**EXPLAINED)

    explained = rt.explain(factory, gpu="cpu", budget=BUDGET, optimizer=None, time_limit_s=0.1)
    assert explained.in_chunks is not None
    assert explained.in_chunks.peak_bytes < 0.5 * explained.plain_peak_bytes
    assert "logits in 16 chunks  peak" in str(explained)


@pytest.mark.slow
def test_the_largest_length_with_chunks_trains_within_the_budget() -> None:
    explained = rt.explain(llama, gpu="cpu", budget=BUDGET, optimizer=None, time_limit_s=0.1, **EXPLAINED)
    assert explained.in_chunks is not None
    plain, size = explained.largest["length"][0.0], explained.in_chunks.largest["length"][0.0]
    assert plain is not None
    assert size is not None
    assert size > 2 * plain
    model, args = llama(**EXPLAINED | {"length": size})
    for x in args:
        x.random_(EXPLAINED["vocabulary"])
    module = rt.rematerialize(model, args, BUDGET, **HOW)
    assert needs(module, args) <= BUDGET
    assert module.plan.overhead < 0.05
    assert needs(module, args, model) > 2 * BUDGET


def test_a_plan_in_chunks_leaves_other_plans_of_the_model_with_the_plain_bits() -> None:
    """Plans of one model share what was captured, which the one call changes."""
    model, inputs = Model(cross_entropy), batch()
    plain = copy.deepcopy(model)
    for implementations in ("joint", "default"):
        module = planned(model, 1.0, implementations)
        model.zero_grad()
        module(*inputs).backward()
    plain(*inputs).backward()
    assert all(op.kind != "remat.linear_cross_entropy" for op in module.plan.graph.operations)
    assert max(differences(model, plain).values()) == 0
