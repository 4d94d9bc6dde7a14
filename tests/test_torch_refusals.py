"""Refusals of a PyTorch step: one line with the user's line, the module and the way out; what is refused no more."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_helpers import MARKS, Applies, Between, assert_same_steps, both, gradients, rematerialize, rows

from remat.errors import InvalidInput
from remat.torch.measuring.measure import difference_of_steps

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore")]
PARTS = "give parts="
opt_einsum = importlib.import_module("opt_einsum") if importlib.util.find_spec("opt_einsum") else None
NO_CHECK = "PyTorch 2.11 does not follow requires_grad_() of a tensor that the model made"


def refused(call: Callable[[], object], *words: str) -> str:
    """The message of a refusal, which is one line, holds all the words and does not end inside of one."""
    with pytest.raises(InvalidInput) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
    return message


def line_of(function: Callable[..., object], text: str = "") -> str:
    """How a refusal names the line of a function that holds a text, or its first line."""
    lines, first = inspect.getsourcelines(function)
    numbers = [first + i for i, line in enumerate(lines) if text in line]
    return f"at line {numbers[0]} of {__file__} (in {function.__name__})"


def net(between: Callable[..., Any] = lambda h, *_: h) -> Any:
    return Between(between, 8)


def assert_trains(model: nn.Module, args: tuple[Any, ...], **options: Any) -> Any:
    planned = rematerialize(model, args, **options)
    assert difference_of_steps(model, planned, args, {}, "cpu") == 0
    return planned


ROWS = (torch.linspace(-1, 1, 48).view(6, 8),)

# Sizes and numbers that depend on values


def masked(x: Tensor) -> Tensor:
    return x[x.sum(1) > 0]  # here


def test_a_refusal_in_the_loop_is_the_same() -> None:
    planned = rematerialize(net(lambda x: masked(x) if len(x) > 4 else x), rows(4, 8))
    refused(lambda: planned(*ROWS), "size of a tensor", line_of(masked, "# here"))


def scaled(x: Tensor) -> Tensor:
    n = (x > 0).sum().item()  # here
    return x / n


def branched(x: Tensor) -> Tensor:
    n = int(torch.ones(3).sum())
    return x * 2 if n == 3 else x  # here


def written(x: Tensor) -> Tensor:
    marks = torch.zeros(4)
    marks[0] = x.sum().detach()
    return x * 2 if marks.sum() > 0 else x  # here


def conditional(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.tanh(), lambda y: y.sin(), (x,))  # here


SIZE, BRANCH = ("size of a tensor", PARTS), ("one graph: Data-dependent ", PARTS)
LINES = [
    (masked, SIZE),
    (written, BRANCH),
    (lambda x: x * 2 if x.sum() > 0 else x, BRANCH),
    (scaled, ("reads a number", ".item()", PARTS)),
    (branched, ("a branch or a size depends on values", PARTS)),
    (conditional, ("no plan can follow cond, which runs a graph of its own", "torch.where", PARTS)),
    pytest.param(
        lambda x: opt_einsum.contract("bi,ij,jk->bk", x, x.T @ x, x.T @ x),
        ("which reaches line ", "of opt_einsum/paths.py"),
        marks=pytest.mark.skipif(opt_einsum is None, reason="opt_einsum is not installed"),
    ),
    (lambda x: torch.distributions.Normal(x, x.exp(), validate_args=True).rsample(), ()),
]


@pytest.mark.parametrize(("between", "words"), LINES)
def test_a_refusal_names_the_users_line(between: Callable[..., Any], words: tuple[str, ...]) -> None:
    """The library behind it too; lines of PyTorch and of Python never; the compiler's own headline varies."""
    model, here = net(between), "# here" if between.__name__ != "<lambda>" else ""
    state = torch.get_rng_state()
    message = refused(lambda: rematerialize(model, ROWS), line_of(between, here), *words)
    assert torch.equal(torch.get_rng_state(), state)
    assert "torch/nn/modules" not in message
    assert "guard" not in message
    assert message.count("at line") == 1


def test_a_number_that_one_pass_reads_is_not_refused() -> None:
    assert_trains(net(lambda x: x.clamp(max=x.detach().max().item() / 2)), ROWS)


def test_a_size_that_is_marked_as_dynamic_is_refused() -> None:
    (x,) = rows(6, 8)
    torch._dynamo.mark_dynamic(x, 0)
    refused(lambda: rematerialize(net(), (x,)), "mark_dynamic", "unmark it")


# Tensors that are more than tensors


class Image(Tensor):
    """A subclass that says nothing about dispatch, as monai's and torchvision's."""


def test_tensors_of_other_kinds_are_refused_with_the_way_out() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    rows_of_lengths, image = [torch.randn(n, 8) for n in (3, 5)], ROWS[0].clone().as_subclass(Image)
    for x, *words in (
        (image, "'x' holds a Image, a subclass", "x.as_subclass(torch.Tensor)"),
        (torch.nested.nested_tensor(rows_of_lengths, layout=torch.jagged), "nested tensor", "to_padded_tensor"),
        (torch.nested.nested_tensor(rows_of_lengths), "nested tensor", "to_padded_tensor"),
        (ROWS[0].to_sparse(), "torch.sparse_coo", "x.to_dense()"),
    ):
        refused(lambda x=x: rematerialize(net(), (x,)), "argument 'x'", *words)
        refused(lambda x=x: rematerialize(net(), (x,), parts=["a", "b"]), "argument 'x'", *words)
    planned = rematerialize(net(), ROWS)
    refused(lambda: planned(image), "argument 'x'", "x.as_subclass(torch.Tensor)")
    planned(image.as_subclass(Tensor)).sum().backward()

    model = net(lambda x, *others: x + sum(others))
    refused(lambda: rematerialize(model, (*ROWS, *ROWS, image)), "argument 'others'", "Image")
    model.register_buffer("scale", torch.ones(8).as_subclass(Image))
    refused(lambda: rematerialize(model, ROWS), "buffer 'scale' is a Image")
    model = net()
    model.b.weight = nn.Parameter(TwoTensor(torch.randn(8, 8), torch.randn(8, 8)))
    refused(lambda: rematerialize(model, ROWS), "the parameter 'b.weight' is a TwoTensor")


# Buffers that keep gradient history


def averaging(update: Callable[[Any, Tensor], None]) -> nn.Module:
    def function(self: Any, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        update(self, x)
        return x * 2 + self.mean

    return Applies(function, 8, mean=torch.zeros(8))


def in_place(model: nn.Module, x: Tensor) -> None:
    model.mean.mul_(0.9).add_(x.mean(0))


def assigned(model: nn.Module, x: Tensor) -> None:
    model.mean = 0.9 * model.mean + x.mean(0)


@pytest.mark.parametrize("update", [in_place, assigned])
def test_a_buffer_that_keeps_history_is_refused_by_name(update: Callable[..., None]) -> None:
    model = nn.Sequential(averaging(update), nn.Linear(8, 8))
    refused(lambda: rematerialize(model, ROWS), "the buffer '0.mean' keeps the gradient history", "h.detach()")
    assert_same_steps(*both(averaging(lambda model, x: update(model, x.detach())), ROWS), *ROWS, n=2)


# Where it stops


def test_a_module_with_a_backward_hook_is_named() -> None:
    def hooked(register: str, place: int) -> Any:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
        getattr([*model.modules()][place], register)(lambda *_: None)
        return model

    for register in ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"):
        model = hooked(register, 4)
        refused(lambda model=model: rematerialize(model, ROWS), "1.1 (Tanh) has a backward hook", "register_hook")
    model = hooked("register_full_backward_hook", 0)
    refused(lambda: rematerialize(model, ROWS), "the model (Sequential) has a backward hook", "on the planned module")
    everywhere = torch.nn.modules.module.register_module_full_backward_hook(lambda *_: None)
    try:
        refused(lambda: rematerialize(net(), ROWS), "backward hooks of all modules")
    finally:
        everywhere.remove()


def test_what_is_said_instead_of_a_backward_hook_works() -> None:
    def doubled(_module: nn.Module, _args: object, output: Tensor) -> None:
        output.register_hook(lambda gradient: 2 * gradient)

    model, seen = net(), list[int]()
    model.a.register_forward_hook(doubled)
    planned = assert_trains(model, ROWS)
    planned.register_full_backward_hook(lambda *_: seen.append(1))
    planned(*ROWS).sum().backward()
    assert seen == [1]


class Reads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x  # in the module


@pytest.mark.parametrize(
    ("last", "n", "words"),
    [
        (Reads(), 6, ["in the module '1' (Reads)", line_of(Reads.forward, "# in the module")]),
        (nn.BatchNorm1d(8), 1, ["the module '1' (BatchNorm", "more than 1 value per channel"]),
    ],
)
def test_the_module_is_named(last: nn.Module, n: int, words: list[str]) -> None:
    message = refused(lambda: rematerialize(nn.Sequential(nn.Linear(8, 8), last), rows(n, 8)), *words)
    assert "torch/nn/modules" not in message
    assert message.count("at line") == isinstance(last, Reads)


# Transforms, and gradients of gradients


def test_torch_func_names_the_plain_model() -> None:
    (x,), planned = ROWS, rematerialize(net(), ROWS)
    parameters = {name: p.detach() for name, p in planned.named_parameters()}

    def functional(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(planned, parameters, (x,))

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        refused(lambda: planned(dual), "use .model inside")
    for call in (
        lambda: torch.func.vmap(planned)(x[None]),
        lambda: torch.func.jvp(planned, (x,), (x,)),
        lambda: torch.func.grad(lambda parameters: functional(parameters).sum())(parameters),
    ):
        refused(call, "torch.func", "use .model inside")
    plain = torch.func.vmap(planned.model)(x[None])[0]
    assert torch.equal(functional(parameters), plain)
    with torch.no_grad():  # where the plain model runs
        assert torch.equal(torch.func.vmap(planned)(x[None])[0], plain)


def test_gradients_of_gradients_name_the_plain_model() -> None:
    x = rows(6, 8)[0].requires_grad_()
    plain, planned = both(net(), (x,))

    def penalty(critic: nn.Module) -> Tensor:
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (gradient.norm(2, 1) - 1).square().mean()

    refused(lambda: penalty(planned), "create_graph=True", "use .model")
    # PyTorch would return zeros here, because it finds no way back to the inputs.
    refused(lambda: torch.autograd.functional.hessian(lambda x: planned(x).sum(), x), "create_graph=True")
    assert all(map(torch.equal, gradients(plain, penalty), gradients(planned.model, penalty)))
    planned(x).sum().backward()  # beside such steps


class Molecule(nn.Module):
    """An energy and the forces on atoms, its derivatives, which a loss reads too."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare
        self.layers = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.prepare(positions)
        energy = self.layers(positions).sum()
        (slope,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -slope


def own_attribute(x: Tensor) -> Tensor:
    x = x.clone()
    x.requires_grad = True
    return x


def follows_leaves() -> bool:
    from torch._dynamo.output_graph import OutputGraph

    return hasattr(OutputGraph, "_check_requires_grad_intermediate_outputs")


@pytest.mark.parametrize(("prepare", "is_leaf"), [(lambda x: x, True), (own_attribute, False)])
def test_forces_in_forward_have_the_bits_of_the_plain_step(prepare: Callable[..., Any], is_leaf: bool) -> None:
    if not is_leaf and not follows_leaves():
        pytest.skip(NO_CHECK)
    x = torch.randn(50, 3).requires_grad_(is_leaf)
    plain, planned = both(Molecule(prepare), (x,), 0.75)
    assert planned.plan.recomputed
    assert_same_steps(plain, planned, x, n=2, loss_of=lambda out: out[0] + out[1].square().sum())


def test_a_leaf_that_is_an_argument_or_an_output_is_refused() -> None:
    model, (x,) = Molecule(lambda x: x.requires_grad_(True)), rows(4, 3)
    words = "lets an argument require a gradient", "call requires_grad_() on it before the module"
    refused(lambda: rematerialize(model, (x,)), *words, line_of(model.prepare).partition(" (in")[0])
    rematerialize(model, (x.requires_grad_(),))  # as it says

    returns = Applies(lambda self, x: (self.a(x := x.clone().requires_grad_(True)), x), 8)
    if follows_leaves():
        refused(lambda: rematerialize(returns, ROWS), "returns a tensor for which it called requires_grad_()")


def test_an_embedding_that_is_made_to_require_a_gradient_trains() -> None:
    """As peft's `enable_input_require_grads` does for checkpoints: everything below is frozen."""
    embedding = nn.Embedding(10, 8)
    embedding.register_forward_hook(lambda _module, _args, output: output.requires_grad_(True))
    model = nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), net()).requires_grad_(False)
    model[3].requires_grad_(True)
    assert assert_trains(model, (torch.randint(0, 10, (16,)),), budget=0.9).plan.recomputed
