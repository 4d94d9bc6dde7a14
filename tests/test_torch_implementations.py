"""Other implementations of ATen's operators against PyTorch's own: results, gradients, and bytes that are kept."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from remat.torch.implementations import (
    IMPLEMENTATIONS,
    Calls,
    Family,
    NotInvertible,
    TorchImplementation,
    _convolution,
    all_arguments,
    dense_strides,
    why_not_invertible,
)
from remat.torch.measuring.timing import peak_of
from remat.torch.step.capture import capture_module
from remat.torch.step.work import kind_of

DTYPES = [torch.float32, torch.float64]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _without_autograd() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_integers(a), _integers(b))


def _integers(x: Tensor) -> Tensor:
    kinds = {torch.float32: torch.int32, torch.float64: torch.int64}
    return x.contiguous().view(kinds[x.dtype]) if x.dtype in kinds else x


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max().clamp_min(1e-300)).item() if a.numel() else 0.0


def layout(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the dimensions of which there is more than one element."""
    return [(n, s) for n, s in zip(x.shape, x.stride(), strict=True) if n > 1]


def awkward(shape: tuple[int, ...], dtype: torch.dtype, *bounds: float) -> Tensor:
    """Random numbers, zeros of both signs, infinities, denormals, the given bounds and their neighbours."""
    x = torch.randn(shape, dtype=dtype)
    special = [0.0, -0.0, math.inf, -math.inf, 1e-310, -1e-310, 1e-40, -1e-40]
    for b in bounds:
        at = torch.tensor(b, dtype=dtype)
        special += [b, *(torch.nextafter(at, torch.tensor(far, dtype=dtype)).item() for far in (9.0, -9.0))]
    flat = x.view(-1)
    flat[:: max(1, len(flat) // 40)] = torch.tensor(special, dtype=dtype).repeat(50)[
        : len(flat[:: max(1, len(flat) // 40)])
    ]
    return flat[torch.randperm(len(flat))].view(shape)


def default_gradient(call: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_()
        return torch.autograd.grad(call(leaf), leaf, grad)[0]


# Every implementation in the place of the calls of a captured graph that it says it stands for.


class Net(nn.Module):
    """One layer between two multiplications, so that its input, its output and its gradients are a graph's own."""

    def __init__(self, layer: Callable[..., Any]):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 1.5) * 0.5


def _normalisation(layer: Any) -> nn.Module:
    """The layer with weights that are not near zero."""
    weight = layer.weight.data
    weight.copy_((torch.randint_like(weight, 2) * 2 - 1) * (torch.rand_like(weight) + 0.2))
    layer.bias.data.normal_()
    return layer


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {  # of those that implementations are named after
    "relu": F.relu, "sigmoid": torch.sigmoid, "tanh": torch.tanh, "hardtanh": F.relu6, "leaky_relu": F.leaky_relu,
    "elu": F.elu, "celu": F.celu, "silu": F.silu, "_softmax": lambda x: F.softmax(x, 1),
    "_log_softmax": lambda x: F.log_softmax(x, 1), "add": lambda x: x + x.sin(), "dropout": lambda x: F.dropout(x, 0.3),
}  # fmt: skip
LAYERS: dict[str, Callable[[], Any]] = {
    "max_pool2d": lambda: nn.MaxPool2d(3, 2, 1),
    "convolution": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "batch_norm_from": lambda: _normalisation(nn.BatchNorm2d(4)),
    "batch_norm_leaky": lambda: nn.Sequential(_normalisation(nn.BatchNorm2d(4)), nn.LeakyReLU()),
    "layer_norm": lambda: _normalisation(nn.LayerNorm((4, 9, 9))),
    "group_norm": lambda: _normalisation(nn.GroupNorm(2, 4)),
}
# Chunks of a projection with its loss replace no call of a captured step: test_torch_chunked_loss.py.
NAMES = [n for n, made in IMPLEMENTATIONS.items() if "cpu" in made.devices and not n.startswith("cross_entropy_in_")]


@functools.cache
def captured(kind: str, dtype: torch.dtype, memory_format: torch.memory_format) -> tuple[fx.Graph, Any, Any]:
    """The joint graph of a function or layer; every node's value, and the random state before each call."""
    net = Net(FUNCTIONS.get(kind) or LAYERS[kind]()).to(dtype)
    x = torch.randn((3, 4, 9, 9), dtype=dtype).to(memory_format=memory_format)
    with torch.enable_grad():
        joint = capture_module(net, (x.requires_grad_(),), {})
    return joint.module.graph, *_run(joint)


def _chain(graph: fx.Graph, kinds: tuple[str, ...], tag: str, near: list[fx.Node]) -> list[fx.Node]:
    """Calls of a pass that are of these kinds, each read by the next; of several such, what reads results of `near`."""
    found = []
    for end in graph.nodes:
        chain = [end]
        for kind in reversed(kinds[:-1]):
            chain = [*[n for n in _read_by(chain[0]) if kind_of(n) == kind][:1], *chain]
        if _pass(end) == tag and tuple(kind_of(n) for n in chain) == kinds:
            found.append(chain)
    return found[0] if len(found) == 1 else next(c for c in found if set(_read_by(c[-1])).intersection(near))


def _read_by(node: fx.Node) -> list[fx.Node]:
    return [n.all_input_nodes[0] if n.target is operator.getitem else n for n in node.all_input_nodes]


def _pass(node: fx.Node) -> str:
    return node.meta.get("partitioner_tag", "is_forward").replace("must_be_in", "is")


def _results(node: fx.Node) -> list[fx.Node]:
    parts = {int(str(u.args[1])): u for u in node.users if u.target is operator.getitem}
    return [parts.get(i, node) for i in range(max(parts) + 1)] if parts else [node]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "memory_format"), [*zip(DTYPES, LAYOUTS, strict=True)], ids=str)
def test_in_the_place_of_captured_calls(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    made = IMPLEMENTATIONS[name]
    (kind,) = (kind for kind in (*FUNCTIONS, *LAYERS) if name.startswith(f"{kind}_"))
    graph, values, states = captured(kind, dtype, memory_format)
    forward = _chain(graph, made.forward_kinds, "is_forward", [])
    backward = _chain(graph, made.backward_kinds, "is_backward", forward) if made.backward_kinds else []

    def of(argument: Any) -> Any:
        return fx.map_arg(argument, lambda n: values[n])

    def arguments(nodes: list[fx.Node]) -> tuple[tuple[Any, ...], ...]:
        return tuple(all_arguments(n.target, n.args, n.kwargs) for n in nodes)

    calls = Calls(arguments(forward), arguments(backward))
    if name.startswith("convolution_im2col") and memory_format is torch.channels_last:
        assert "layout" in made.why_not(calls)
        return
    assert made.why_not(calls) == ""  # by the nodes' fake tensors
    by_tensors = Calls(tuple(map(of, calls.forward)), tuple(map(of, calls.backward)))
    assert made.why_not(by_tensors) == ""
    computed = [(values[forward[call]], i) for call, i in made.results]
    expected = [value[i] if isinstance(value, (tuple, list)) else value for value, i in computed]
    results, kept = expected, []
    if made.forward is not None:
        given = [_copy(a) for a in of(made.forward_arguments(calls))]
        if made.random:
            torch.set_rng_state(states[forward[0]])
        returned = made.forward(*given)
        returned = list(returned) if isinstance(returned, tuple) else [returned]
        results, kept = returned[: len(expected)], returned[len(expected) :]
        assert len(kept) == len(made.kept)
        _check_results(made, results, expected)
        if made.overwrites is not None:
            assert results[0].data_ptr() == given[made.overwrites].data_ptr()
        _check_fake(made.forward, given, returned)
    if made.backward is None:
        return
    nodes = [_results(forward[call])[i] if i < len(_results(forward[call])) else None for call, i in made.results]
    found = made.backward_arguments(Calls(calls.forward, calls.backward, tuple(nodes), tuple(kept)))
    tensors = dict(zip([n for n in nodes if n is not None], results, strict=False))
    found = fx.map_arg(found, lambda n: tensors.get(n, values[n]))
    found = [_copy(a) for a in found]
    before = torch.get_rng_state()
    gradients = made.backward(*found)
    assert torch.equal(before, torch.get_rng_state())
    wanted = values[backward[-1]]
    _check_gradients(made, gradients, wanted, dtype)
    _check_fake(made.backward, found, gradients)


def _run(joint: Any) -> tuple[dict[fx.Node, Any], dict[fx.Node, Tensor]]:
    states: dict[fx.Node, Tensor] = {}

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            states[n] = torch.get_rng_state()
            return super().run_node(n)

    primals = [p.detach() if isinstance(p, Tensor) else p for p in joint.primals]
    tangents = []
    for n in joint.tangents:
        val = n.meta["val"]
        tangents.append(torch.empty_strided(val.shape, val.stride(), dtype=val.dtype).normal_())
    run = Run(joint.module, garbage_collect_values=False)
    run.run(*primals, *tangents)
    return run.env, states


def _copy(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.numel() == 0 or 0 in x.stride():
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def _check_results(made: TorchImplementation, results: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(results, expected, strict=True):
        assert layout(a) == layout(b)
        if made.family is Family.ALGORITHM:
            assert relative_error(a, b) <= made.tolerance[str(a.dtype).removeprefix("torch.")]
        else:
            assert same_bits(a, b)


def _check_gradients(made: TorchImplementation, found: Any, wanted: Any, dtype: torch.dtype) -> None:
    if isinstance(wanted, (tuple, list)):
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                _check_gradients(made, a, b, dtype)
        return
    assert layout(found) == layout(wanted)
    if made.exact:
        assert same_bits(found, wanted)
    else:
        assert relative_error(found, wanted) <= made.tolerance[str(dtype).removeprefix("torch.")]


def _check_fake(call: Callable[..., Any], args: Any, returned: Any) -> None:
    """A rule pass that runs the function on fake tensors learns the shapes and layouts of the real results."""
    with FakeTensorMode() as mode:
        made = call(*tree_map(lambda a: mode.from_tensor(a) if isinstance(a, Tensor) else a, tuple(args)))
    made = made if isinstance(made, (tuple, list)) else [made]
    real = returned if isinstance(returned, (tuple, list)) else [returned]
    for a, b in zip(made, real, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.dtype, layout(a)) == (b.dtype, layout(b))


def called(name: str) -> tuple[Any, Any]:
    """(forward, backward) of the implementation."""
    return IMPLEMENTATIONS[name].forward, IMPLEMENTATIONS[name].backward


def activations() -> Iterator[tuple[str, Any, Any, bool, tuple[float, ...]]]:
    """(implementation, default, (gradient, x, y) -> the gradient of x, of NaN too?, bounds)"""
    (relu, packed), (hardtanh, _) = called("relu_packed"), called("hardtanh_packed")
    from_relu, of_hardtanh, of_leaky, of_elu = (
        called(f"{name}_from_output")[1] for name in ("relu", "hardtanh", "leaky_relu", "elu")
    )
    yield "relu_packed", F.relu, lambda g, x, y: packed(g, relu(x)[1], dense_strides(y)), True, (0.0,)
    yield "relu_from_output", F.relu, lambda g, _, y: from_relu(g, y, 0), True, (0.0,)
    for lo, hi in ((-1.0, 1.0), (0.0, 6.0), (-0.1, 0.3)):
        default = partial(F.hardtanh, min_val=lo, max_val=hi)
        in_bits = lambda g, x, y, lo=lo, hi=hi: packed(g, hardtanh(x, lo, hi)[1], dense_strides(y))  # noqa: E731
        yield "hardtanh_packed", default, in_bits, False, (lo, hi)
        yield "hardtanh_from_output", default, lambda g, _, y, lo=lo, hi=hi: of_hardtanh(g, y, lo, hi), True, (lo, hi)
    for slope in (0.0, 1e-30, 0.01, 1.0, 3.0):
        default = partial(F.leaky_relu, negative_slope=slope)
        yield "leaky_relu_from_output", default, lambda g, _, y, s=slope: of_leaky(g, y, s), True, (0.0,)
    for how in ((1.0, 1.0, 1.0), (1.6732632423543772, 1.0507009873554805, 1.0), (0.3, 1.0, 1 / 0.3)):
        default = lambda x, how=how: aten.elu(x, *how)  # noqa: E731
        yield "elu_from_output", default, lambda g, _, y, how=how: of_elu(g, y, *how), False, (0.0,)


ACTIVATIONS = [*activations()]
IMAGES = [*itertools.product([(1, 1, 1, 1), (3, 8, 16, 33)], DTYPES, LAYOUTS)]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda case: case[0])
def test_gradients_of_activations(case: Any) -> None:
    name, default, gradient, of_nan, bounds = case
    for shape, dtype, memory_format in IMAGES:
        x, grad = awkward(shape, dtype, *bounds), torch.randn(shape, dtype=dtype)
        x, grad = x.to(memory_format=memory_format), grad.to(memory_format=memory_format)
        if of_nan:
            x[..., 0] = math.nan
        wanted, found = default_gradient(default, x, grad), gradient(grad, x, default(x))
        _check_gradients(IMPLEMENTATIONS[name], found, wanted, x.dtype)


def test_gradients_that_are_expanded_or_of_another_layout() -> None:
    relu, backward = called("relu_packed")
    for (shape, dtype, memory_format), other in zip(IMAGES, LAYOUTS[::-1] * 4, strict=True):
        y, packed = relu(awkward(shape, dtype).to(memory_format=memory_format))
        for g in (torch.ones((), dtype=dtype).expand(shape), torch.randn_like(y).contiguous(memory_format=other)):
            found, wanted = backward(g, packed, dense_strides(y)), aten.threshold_backward(g, y, 0)
            _check_gradients(IMPLEMENTATIONS["relu_packed"], found, wanted, dtype)


def test_layouts_that_differ_from_the_trace() -> None:
    x, grad = torch.randn(2, 2, 3, 5, 7)
    strides = x.to(memory_format=torch.channels_last).stride()
    (relu, backward), (dropout, of_dropout) = called("relu_packed"), called("dropout_packed")
    y, packed = relu(x, strides)
    assert same_bits(backward(grad, packed, strides), aten.threshold_backward(grad, y, 0))
    y, packed = dropout(torch.ones_like(x), 0.5, True, strides)
    assert torch.equal(of_dropout(torch.ones_like(x), packed, 1.0, strides), (y != 0).float())
    with refused("drawn again"):
        called("dropout_replayed")[0](x, 0.5, True, strides)


def test_hardtanh_packed_blocks_nan() -> None:
    x, grad = torch.full((64,), math.nan), torch.ones(64)  # a multiple of the vector's length: no scalar tail
    forward, backward = called("hardtanh_packed")
    assert same_bits(backward(grad, forward(x)[1], (1,)), aten.hardtanh_backward(grad, x, -1, 1))


@st.composite
def pools(draw: Any) -> tuple[Any, ...]:
    """(shape, kernel, stride, padding, dilation, ceil_mode) that ATen accepts."""
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, k // 2)) for k in kernel)
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    sides = [d * (k - 1) + 1 + draw(st.integers(0, 9)) for k, d in zip(kernel, dilation, strict=True)]
    batch = draw(st.sampled_from([(), (1,), (3,)]))
    return (*batch, draw(st.integers(1, 4)), *sides), kernel, stride, padding, dilation, draw(st.booleans())


@given(pools(), st.sampled_from(DTYPES), st.sampled_from(LAYOUTS), st.booleans(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_max_pool(case: Any, dtype: Any, memory_format: Any, ties: bool, nan: bool) -> None:
    shape, *window = case
    x = torch.randint(0, 3, shape).to(dtype) if ties else torch.randn(shape, dtype=dtype)
    if nan:
        x[torch.rand(shape) < 0.1] = math.nan
        x[torch.rand(shape) < 0.2] = -math.inf
    if len(shape) == 4:
        x = x.to(memory_format=memory_format)
    y, indices = aten.max_pool2d_with_indices(x, *window)
    grad = torch.randn_like(y)
    wanted = aten.max_pool2d_with_indices_backward(grad, x, *window, indices)
    assert same_bits(wanted, default_gradient(lambda t: F.max_pool2d(t, *window[:4], ceil_mode=window[4]), x, grad))
    (pool, of_offsets), (again, recomputed) = called("max_pool2d_offsets"), called("max_pool2d_recomputed")
    values, offsets = pool(x, *window)
    assert same_bits(values, y)
    assert same_bits(again(x, *window), y)
    assert offsets.nbytes * 8 == indices.nbytes
    where = (x.shape, x.stride(), *window)
    of_indices = called("max_pool2d_indices")[1]
    for found in (
        recomputed(grad, x, *window), of_indices(grad, *where, indices), of_offsets(grad, *where, offsets),
    ):  # fmt: skip
        assert same_bits(found, wanted)
        assert layout(found) == layout(wanted)


def test_max_pool_of_the_largest_window() -> None:
    x = torch.randn(1, 2, 40, 40)
    forward, backward = called("max_pool2d_offsets")
    y, offsets = forward(x, [16, 16], [3, 3])
    assert offsets.max() > 200
    window = ([16, 16], [3, 3], [0, 0], [1, 1], False)
    _, indices = aten.max_pool2d_with_indices(x, *window)
    wanted = aten.max_pool2d_with_indices_backward(torch.ones_like(y), x, *window, indices)
    assert same_bits(backward(torch.ones_like(y), x.shape, x.stride(), *window, offsets), wanted)
    too_large = Calls(((x, [17, 16], [3, 3], [0, 0], [1, 1], False),))
    assert "more than a byte" in IMPLEMENTATIONS["max_pool2d_offsets"].why_not(too_large)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("dtype", "memory_format"), [*zip(DTYPES, LAYOUTS, strict=True)], ids=str)
def test_dropout(p: float, memory_format: Any, dtype: Any) -> None:
    x = torch.randn((2, 3, 5, 7), dtype=dtype).to(memory_format=memory_format)
    grad, scale = torch.randn_like(x), 0.0 if p == 1 else 1 / (1 - p)
    state = torch.get_rng_state()
    y, mask = aten.native_dropout(x, p, True)
    wanted, after = aten.native_dropout_backward(grad, mask, scale), torch.get_rng_state()
    torch.set_rng_state(state)
    (forward, backward), (replayed, of_replayed) = called("dropout_packed"), called("dropout_replayed")
    found, packed = forward(x, p, True)
    assert same_bits(found, y)
    assert torch.equal(torch.get_rng_state(), after)
    assert packed.nbytes == -(-mask.nbytes // 8)
    assert same_bits(backward(grad, packed, scale, mask.stride()), wanted)
    torch.set_rng_state(state)
    found, kept = replayed(x, p, True)
    assert same_bits(found, y)
    assert kept.nbytes == state.nbytes
    torch.rand(3)
    now = torch.get_rng_state()
    assert same_bits(of_replayed(grad, kept, p, scale, mask.stride()), wanted)
    assert torch.equal(torch.get_rng_state(), now)


# Normalisation.


def _error_of_batch_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> float:
    grad, n, wanted_affine = torch.randn_like(x), x.shape[1], weight is not None
    running = torch.zeros(n, dtype=x.dtype), torch.ones(n, dtype=x.dtype)
    forward, backward = called("batch_norm_from_output")
    y, _, rstd, *_ = forward(x, weight, bias, *running, True, 0.1, 1e-5)
    found = backward(grad, y, weight, bias, rstd, [True, wanted_affine, wanted_affine])[0]
    return relative_error(found, default_gradient(lambda t: F.batch_norm(t, None, None, weight, bias, True), x, grad))


def test_norms_without_affine() -> None:
    x, grad = torch.randn(2, 16, 3, 5, dtype=torch.float64)
    assert _error_of_batch_norm(x, None, None) <= 1e-10
    for inner in ((5,), (3, 5)):
        forward, backward = called("layer_norm_from_output")
        y, _, rstd = forward(x, inner, None, None, 1e-5)
        found = backward(grad, y, inner, rstd, None, None, [True, False, False])
        wanted = default_gradient(lambda t, inner=inner: F.layer_norm(t, inner), x, grad)
        assert relative_error(found[0], wanted) <= 1e-10


def test_batch_norm_up_to_the_limit_of_the_rule() -> None:
    """The promise holds for biases as large, against their weights, as are let through."""
    for dtype, ratio in ((torch.float32, 60.0), (torch.float64, 3e5)):
        weight = torch.full((4,), 0.01, dtype=dtype)
        assert why_not_invertible(weight, ratio * weight, dtype) == ""
        error = _error_of_batch_norm(torch.randn(16, 4, 9, 9, dtype=dtype), weight, ratio * weight)
        assert error <= IMPLEMENTATIONS["batch_norm_from_output"].tolerance[str(dtype)[6:]]


@pytest.mark.parametrize(
    ("weight", "bias", "dtype"),
    [
        (0.0, 0.0, torch.float32), (1e-13, 0.0, torch.float32), (math.nan, 0.0, torch.float32),
        (0.01, 1.0, torch.float32), (1e-7, 1.0, torch.float64), (1.0, math.nan, torch.float64),
        (1.0, 0.0, torch.float16), (1.0, 0.0, torch.bfloat16),
    ],
)  # fmt: skip
def test_what_cannot_be_inverted_is_refused_in_the_forward_pass(weight: float, bias: float, dtype: Any) -> None:
    w, b = torch.tensor([1.0, weight], dtype=dtype), torch.tensor([0.0, bias], dtype=dtype)
    assert why_not_invertible(w, b, dtype)
    x, running = torch.randn(4, 2, 3).to(dtype), (torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype))
    for kind, args in (
        ("batch_norm", (x, w, b, *running, True, 0.1, 1e-5)), ("group_norm", (x, w, b, 4, 2, 3, 1, 1e-5)),
        ("layer_norm", (x.mT.contiguous(), [2], w, b, 1e-5)),
    ):  # fmt: skip
        with pytest.raises(NotInvertible, match="keep the layer's input"):
            called(f"{kind}_from_output")[0](*args)


def test_activations_that_cannot_be_inverted_are_refused() -> None:
    x, one, zero = torch.randn(64, 1, 3), torch.ones(1), torch.zeros(1)
    calls = Calls(((x, one, zero, zero, one, True, 0.1, 1e-5), (x, 0.0)))
    assert "slope" in IMPLEMENTATIONS["batch_norm_leaky_relu"].why_not(calls)


# Convolution.


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"),
    [
        ((1, 1), (1, 1), (0, 0), (1, 1)), ((3, 3), (1, 1), (1, 1), (1, 1)), ((3, 2), (2, 1), (0, 1), (1, 1)),
        ((3, 3), (2, 2), (2, 2), (2, 2)), ((1, 1), (2, 2), (0, 0), (1, 1)), ((5, 1), (1, 3), (2, 0), (1, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("dtype", "memory_format"), [*itertools.product(DTYPES, LAYOUTS)], ids=str)
def test_convolution(dtype: Any, memory_format: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
    x = torch.randn(3, 4, 11, 12, dtype=dtype).to(memory_format=memory_format)
    bias = memory_format is torch.contiguous_format
    weight, shift = torch.randn(5, 4, *kernel, dtype=dtype), torch.randn(5, dtype=dtype) if bias else None
    options = (stride, padding, dilation, False, (0, 0), 1)
    y = aten.convolution(x, weight, shift, *options)
    grad = torch.randn_like(y)
    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        wanted = torch.autograd.grad(F.conv2d(*leaves, shift, stride, padding, dilation), leaves, grad)
    tolerance = IMPLEMENTATIONS["convolution_native"].tolerance[str(dtype)[6:]]
    for name in ("im2col", "im2col_per_sample", "native", "channels_last"):
        made = IMPLEMENTATIONS[f"convolution_{name}"]
        assert relative_error(made.forward(x, weight, shift, *options), y) <= tolerance
        found = made.backward(grad, x, weight, [5], *options, [True, True, bias])
        for a, b in zip(found[:2], wanted, strict=True):
            assert relative_error(a, b) <= tolerance
        assert (found[2] is not None and relative_error(found[2], grad.sum((0, 2, 3))) <= tolerance) == bias
        assert made.backward(grad, x, weight, None, *options, [False, True, False])[::2] == (None, None)


def test_switches_are_put_back() -> None:
    def switches() -> tuple[bool, ...]:
        now = torch.backends.cudnn
        return (torch.backends.mkldnn.enabled, torch._C._get_nnpack_enabled(), now.enabled, now.benchmark,
                now.deterministic)  # fmt: skip

    before, x = switches(), torch.randn(1, 1, 3, 3)
    options = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    for name in ("native", "cudnn_benchmark", "cudnn_deterministic"):
        forward, _ = called(f"convolution_{name}")
        forward(x, x, *options)
        with pytest.raises(RuntimeError):
            forward(x, x, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 7)
        assert switches() == before
    with _convolution._native():
        assert switches()[:3] == (False, False, False)
    assert switches() == before


@pytest.mark.parametrize(("name", "n"), [("convolution_im2col", 4), ("convolution_im2col_per_sample", 1)])
def test_columns_are_the_workspace_of_im2col(name: str, n: int) -> None:
    x, weight = torch.randn(4, 3, 16, 16), torch.randn(8, 3, 3, 3)
    forward, backward = called(name)
    options, columns = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1), n * 3 * 9 * 256 * 4
    y, peak = peak_of(lambda: forward(x, weight, None, *options), "cpu")
    assert columns <= peak - y.nbytes <= 1.1 * columns
    _, peak = peak_of(lambda: backward(y, x, weight, None, *options, [True, True, False]), "cpu")
    assert columns <= peak - x.nbytes - weight.nbytes <= 1.1 * columns
