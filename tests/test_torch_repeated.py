"""Steps of which a few blocks are captured, and kernels that a GPU would run."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from remat.cost import load_gpu
from remat.torch.explaining.factory import StepFactory
from remat.torch.explaining.gpu_kernels import (
    _fused_rms_norm,
    allocated,
    attention_kernel,
    kernels_of,
    library_bytes,
    with_workspaces,
)
from remat.torch.frontend import build, graphs, repeated
from remat.torch.frontend.repeated import Row
from remat.torch.measuring.plain import plain_step
from remat.torch.networks.llama import llama

SMALL = {"vocabulary": 50, "width": 32, "hidden": 48, "n_heads": 2, "length": 16}
FEW = 8


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few blocks be worth it."""
    monkeypatch.setattr(repeated, "LEAST", FEW)


@functools.cache
def described() -> graphs.DescribedGraph:
    """The step of a small language model whose blocks are copied."""
    model, args = llama(2, n_layers=FEW, **SMALL)
    made = graphs.described_graph(model, args, name="step")
    assert len(model.blocks) == FEW  # none is gone
    return made


def same(made: graphs.DescribedGraph, whole: graphs.DescribedGraph) -> bool:
    """Whether two descriptions are of the same graph and modules; of `made`, few blocks were captured."""
    assert made.repeated is not None
    return repeated._facts(made.graph) == repeated._facts(whole.graph) and made.modules == whole.modules


def test_a_step_of_copied_blocks_is_the_captured_one() -> None:
    model, args = llama(2, n_layers=FEW, **SMALL)
    whole = graphs.described_graph(model, args, name="step", repeats=False)
    assert described().captured == "6 of 8 equal blocks, the others as copies"
    assert not whole.captured
    assert same(described(), whole)


def test_another_size_needs_fewer_blocks() -> None:
    more, args = llama(3, n_layers=FEW, **SMALL | {"length": 24})
    made = graphs.described_graph(more, args, name="step", repeats=described().repeated, n_chunks=4)
    whole = graphs.described_graph(more, args, name="step", repeats=False, n_chunks=4)
    assert same(made, whole)
    assert made.repeated.n_captured < repeated.SHALLOW
    assert repeated._facts(made.in_chunks) == repeated._facts(whole.in_chunks)


def test_blocks_of_another_form_are_found_anew() -> None:
    known = graphs.described_graph(Deep(), (torch.ones(2, 8),), name="deep").repeated
    other = Deep(lambda i, block, x: torch.relu(block(x)) + x)
    made = graphs.described_graph(other, (torch.ones(2, 8),), name="deep", repeats=known)
    assert same(made, graphs.described_graph(other, (torch.ones(2, 8),), name="deep", repeats=False))
    assert made.repeated.n_captured < repeated.SHALLOW


def test_the_bytes_of_a_deep_step_follow_from_those_of_a_shallow_one() -> None:
    copies = described().repeated.copies
    more, args = llama(3, n_layers=FEW, **SMALL | {"length": 24})  # another size
    step, args = build.loss_step(more, args, None)
    deep = plain_step(step, args, {})
    assert copies.n_blocks < repeated.SHALLOW
    with Row(more, "blocks").cut_to(copies.n_blocks):
        shallow = plain_step(step, args, {})
    assert copies.deepened(shallow.held_bytes) == [*deep.held_bytes]


def test_more_blocks_are_followed_where_few_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated, "FEWEST", 1)  # its block reads the input, further ones a block
    made = graphs.described_graph(Deep(), (torch.ones(2, 8),), name="deep").repeated
    assert made.copies.n_blocks == repeated.SHALLOW


class Deep(nn.Module):
    """Blocks of which the last one, or another, may run otherwise, because of its number."""

    def __init__(self, run=lambda i, block, x: torch.tanh(block(x))):
        super().__init__()
        self.run, self.blocks = run, nn.ModuleList(nn.Linear(8, 8) for _ in range(FEW))

    def forward(self, x):
        for i, block in enumerate(self.blocks):
            x = self.run(i, block, x)
        return x.sum()


def relu_at_the_end(i, block, x):  # the captured blocks run alike
    return torch.tanh(block(x) if i < FEW - 1 else torch.relu(block(x)))


def hook_at_the_end(i, block, x):
    y = torch.tanh(block(x))
    if i == FEW - 1 and y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return x + y


@pytest.mark.parametrize("run", [relu_at_the_end, hook_at_the_end])
def test_a_block_that_runs_otherwise_or_whose_backward_pass_differs_is_found(run) -> None:
    made = graphs.described_graph(Deep(run), (torch.ones(2, 8),), name="deep")
    assert made.captured == "as a whole: its blocks do not run the same operations"
    assert sum(op.kind == "aten.relu" for op in made.graph.operations) == (run is relu_at_the_end)


def test_blocks_that_differ_at_another_size_are_followed_one_by_one() -> None:
    def alternating(batch_size: int = 1) -> tuple[nn.Module, tuple[torch.Tensor]]:
        model = Deep(lambda i, block, x: torch.sigmoid(block(x)) if i % 2 and len(x) > 1 else torch.neg(block(x)))
        return model, (torch.ones(batch_size, 8),)

    made, whole = (StepFactory(alternating, {"batch_size": 1}, load_gpu("cpu")) for _ in range(2))
    whole.repeats = False
    assert made.step({})[0].captured
    assert made.copies is not None
    whole.step({})
    assert made.needs({"batch_size": 4}) == whole.needs({"batch_size": 4})


def test_rows_are_equal_blocks_with_parameters_of_their_own() -> None:
    tied, uneven = Deep(), Deep()
    tied.blocks[3].weight = tied.blocks[0].weight
    uneven.blocks[3] = nn.Linear(8, 8, bias=False)
    assert [row and row.path for row in map(Row.of, (Deep(), tied, uneven))] == ["blocks", None, None]


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("capability", "dtype", "query", "key", "value", "options", "kernel"),
    [
        (90, BF16, (2, 4, 16, 256), None, None, {}, "cudnn"), (90, BF16, (2, 4, 16, 512), None, None, {}, "efficient"),
        (80, BF16, (2, 4, 16, 64), None, None, {}, "flash"), (80, FP16, (2, 4, 16, 64), None, None, None, "efficient"),
        (70, FP16, (2, 4, 16, 64), None, None, {}, "efficient"), (70, BF16, (2, 4, 16, 64), None, None, {}, "math"),
        (90, FP32, (2, 4, 16, 64), None, None, {}, "efficient"), (90, FP64, (2, 4, 16, 64), None, None, {}, "math"),
        (90, BF16, (2, 4, 16, 64), (2, 4, 16, 64), (2, 4, 16, 128), {}, "cudnn"),
        (90, BF16, (2, 4, 16, 64), (2, 4, 1, 64), None, {}, "flash"),  # cuDNN takes no single key
        (80, BF16, (2, 4, 16, 64), (2, 4, 8, 64), None, {"is_causal": True}, "efficient"),
        (80, BF16, (2, 4, 16, 64), (2, 2, 16, 64), None, {"enable_gqa": True}, "flash"),
        # grouped heads: flash and cuDNN only
        (80, BF16, (2, 4, 16, 64), (2, 2, 16, 64), (2, 2, 16, 128), {"enable_gqa": True}, "math"),
        (90, BF16, (2, 4, 16, 64), (1, 4, 16, 64), None, {}, "math"),  # it would broadcast
    ],
)  # fmt: skip
def test_the_kernel_that_a_gpu_runs(capability, dtype, query, key, value, options, kernel) -> None:
    tensors = [torch.empty(x or key or query, dtype=dtype, device="meta") for x in (query, key, value)]
    mask = torch.empty(16, 16, dtype=torch.bool, device="meta") if options is None else None
    assert attention_kernel(capability, *tensors, mask, **options or {}) == kernel


def test_the_fused_norm_is_that_of_pytorch() -> None:
    x, weight = torch.randn(3, 5, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    given = torch.randn(3, 5, 16)
    ours, plain = _fused_rms_norm(x, [16], weight, 1e-5)[0], F.rms_norm(x, [16], weight, 1e-5)
    assert torch.allclose(ours, plain, atol=1e-6)
    found, known = (torch.autograd.grad(y, (x, weight), given) for y in (ours, plain))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, known, strict=True))
    with kernels_of(load_gpu("h100")):  # a norm in float32 gives its argument's type back
        half, wide = torch.empty(3, 16, dtype=torch.bfloat16, device="meta"), torch.empty(16, device="meta")
        assert F.rms_norm(half, [16]).dtype == F.rms_norm(half, [16], wide).dtype == torch.bfloat16


def test_a_capture_for_a_gpu_has_its_kernels() -> None:
    gpu, (model, args) = load_gpu("h100"), llama(2, n_layers=1, n_groups=1, dtype="bfloat16", **SMALL)
    with kernels_of(gpu):
        graph = with_workspaces(graphs.training_graph_of(model, args, name="step"))
    kinds = {op.kind.rpartition(".")[2]: op for op in graph.operations}
    assert {"_fused_rms_norm", "_fused_rms_norm_backward", "_scaled_dot_product_cudnn_attention"} <= kinds.keys()
    backward = kinds["_scaled_dot_product_cudnn_attention_backward"]
    assert backward.workspace_bytes == 4 * 2 * 2 * 16 * (32 + 1)  # batch, heads, length, width to 32, and a row's sum
    assert all(value.bytes % 512 == 0 for value in allocated(graph, gpu).values)
    assert library_bytes(graph, gpu) == 32 * 2**20
    assert library_bytes(graph, load_gpu("cpu")) == 0
    without = graphs.training_graph_of(model, args, name="step")
    assert "_scaled_dot_product_flash_attention_for_cpu" in {op.kind.rpartition(".")[2] for op in without.operations}
