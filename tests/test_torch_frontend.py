"""Training graphs of PyTorch models against eager PyTorch, its FLOP counter and hand-computed values."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import refused, run_python

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.flop_counter import (  # noqa: E402
    FlopCounterMode,
    conv_backward_flop,
    sdpa_backward_flop,
    sdpa_flop,
)
from torch_helpers import Applies  # noqa: E402

import remat  # noqa: E402
from remat import extraction  # noqa: E402
from remat.frontends import spec  # noqa: E402
from remat.torch.frontend import build  # noqa: E402
from remat.torch.frontend import graphs as frontend  # noqa: E402
from remat.torch.networks.diffusion_unet import diffusion_unet  # noqa: E402
from remat.torch.networks.googlenet import googlenet  # noqa: E402
from remat.torch.networks.llama import llama  # noqa: E402
from remat.torch.networks.mobilenet_v2 import mobilenet_v2  # noqa: E402
from remat.torch.networks.resnet import resnet50  # noqa: E402
from remat.torch.networks.t5 import t5  # noqa: E402
from remat.torch.networks.transformer import gpt2, vit  # noqa: E402
from remat.torch.networks.unet import unet  # noqa: E402
from remat.torch.networks.vgg import vgg16, vgg19  # noqa: E402

aten = torch.ops.aten
logging.getLogger("torch.__trace").propagate = False  # pytest would format every trace event of the compiler


def test_hand_computed_mlp() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    graph = frontend.training_graph_of(model, (torch.zeros(5, 3),), name="mlp", loss_fn="mean")
    rows = [
        (op.kind, op.inputs, [graph.values[v].bytes for v in op.outputs], op.is_backward, op.work.flops)
        for op in graph.operations
    ]
    assert rows == [
        ("aten.addmm", (), [80], False, 2 * 5 * 4 * 3),
        ("aten.relu", (0,), [80], False, 20),
        ("aten.addmm", (1,), [40], False, 2 * 5 * 2 * 4),
        ("aten.mean", (2,), [4], False, 10),
        ("aten.div", (), [40], True, 10),  # of the tangent, expanded: a view of fixed memory
        ("aten.mm", (4,), [80], True, 2 * 5 * 4 * 2),
        ("aten.mm", (1, 4), [32], True, 2 * 2 * 4 * 5),
        ("aten.sum", (4,), [8], True, 10),
        ("aten.threshold_backward", (1, 5), [80], True, 20),
        ("aten.mm", (8,), [48], True, 2 * 4 * 3 * 5),
        ("aten.sum", (8,), [16], True, 20),
    ]
    parameters, inputs, tangent = 4 * (12 + 4 + 8 + 2), 60, 4
    assert graph.fixed_bytes == parameters + inputs + tangent
    assert graph.loss == 3
    assert [v for v, value in enumerate(graph.values) if value.keep] == [3, 6, 7, 9, 10]
    assert graph.operations[0].work.bytes_moved == 16 + 60 + 48 + 80  # bias, x, weight, result
    assert graph.operations[4].work.bytes_moved == 4 + 40  # an expanded scalar is read once
    signature = json.loads(graph.operations[0].work.signature)
    weight = {"t": [3, 4], "s": [1, 3], "d": "float32"}
    assert signature["args"] == [
        {"t": [4], "s": [1], "d": "float32"},
        {"t": [5, 3], "s": [3, 1], "d": "float32"},
        weight,
    ]
    assert (signature["fw"], signature["op"], signature["kwargs"]) == ("torch", "aten.addmm.default", {})


def small(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Convolution, batch norm, in-place ReLU, a split and a concatenation, pooling, linear."""
    x = F.relu(self.norm(self.conv(x)), inplace=True)
    left, right = x.chunk(2, dim=1)
    x = self.drop(torch.cat([right, left * 2], dim=1))
    x = F.relu(self.norm_2(self.more(x)))
    return self.head(F.max_pool2d(x, 2).mean((2, 3)))


def graph_of(model: nn.Module, *args: torch.Tensor) -> remat.Graph:
    """The graph, whose capture leaves the model as it is."""
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    graph = frontend.training_graph_of(model, args, name="graph")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return graph


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_buffers_are_updated_once_and_at_the_end(dropout: float) -> None:
    model = Applies(
        small, 0, conv=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), more=nn.Conv2d(8, 8, 3),
        norm_2=nn.BatchNorm2d(8), drop=nn.Dropout(dropout), head=nn.Linear(8, 5), unused=nn.Parameter(torch.zeros(3)),
    )  # fmt: skip
    graph = graph_of(model, torch.randn(4, 3, 12, 12))
    update = [op for op in graph.operations if op.run_once]
    assert [op.kind for op in update] == ["remat.update_buffers"]
    assert len(update[0].inputs) == 4  # mean and variance of two layers; the counters are made within
    assert not update[0].is_backward
    dropped = [op for op in graph.operations if op.kind == "aten.native_dropout"]
    assert len(dropped) == bool(dropout)
    assert all(len(op.outputs) == 2 for op in dropped)


def test_attention_is_one_operation() -> None:
    model, _ = gpt2(2, length=16, vocabulary=50, context=16, width=32, n_layers=2, n_heads=2, dropout=0.0)
    kinds = [op.kind for op in graph_of(model, *torch.randint(0, 50, (2, 2, 16))).operations]
    assert kinds.count("aten._scaled_dot_product_flash_attention_for_cpu") == 2


def test_reader_of_an_overwritten_buffer_runs_once() -> None:
    def drifting(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x) + self.level)
        self.level.mul_(0.5)
        return self.a(x)

    graph = graph_of(Applies(drifting, 6, level=torch.ones(6)), torch.randn(3, 6))
    assert [op.kind for op in graph.operations if op.run_once] == ["aten.add", "remat.update_buffers"]


def test_spectral_norm_assigns_attributes_besides_its_buffers() -> None:
    graph = graph_of(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)), torch.randn(2, 8))
    assert sum(op.kind == "remat.update_buffers" for op in graph.operations) == 1


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_each_recurrent_layer_is_one_operation(layer: type[nn.Module]) -> None:
    rows = layer(8, 16, num_layers=2, batch_first=True)
    model = Applies(lambda self, x: self.head(self.rows(self.a(x))[0][:, -1]), 8, rows=rows, head=nn.Linear(16, 4))
    graph = graph_of(model, torch.randn(2, 5, 8))
    layers = [op for op in graph.operations if op.kind == "remat.recurrent"]
    backward = [op for op in graph.operations if op.kind == "remat.recurrent_backward"]
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[layer]
    per_step = [gates * 16 * (width + 16) for width in (8, 16)]  # multiply-adds of a sample: input and state
    assert [op.work and op.work.flops for op in layers] == [2 * 2 * 5 * n for n in per_step]
    assert [op.work and op.work.flops for op in backward] == [3 * 2 * 2 * 5 * n for n in reversed(per_step)]
    assert all(op.work is not None and op.work.flops is not None for op in graph.operations)


class Counter(FlopCounterMode):
    """PyTorch's counter, with two gaps closed in its own terms.

    It ignores the CPU's fused attention, and multiplies the weight gradient of a grouped
    convolution by the number of groups (repaired upstream in pytorch/pytorch#183405).
    """

    def __init__(self) -> None:
        def attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return sdpa_flop(q, k, v)

        def attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return sdpa_backward_flop(grad, q, k, v)

        def convolution_backward(*args: Any, out_shape: Any = None, **__: Any) -> int:
            both = [
                conv_backward_flop(*args[:10], [*mask, False], out_val=out_shape)
                for mask in ((args[10][0], False), (False, args[10][1]))
            ]
            return both[0] + both[1] // args[9]

        super().__init__(
            display=False,
            custom_mapping={
                aten._scaled_dot_product_flash_attention_for_cpu: attention,
                aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
                aten.convolution_backward: convolution_backward,
            },
        )


def resnet18() -> nn.Module:
    return resnet50(depth=18)


def resnet101() -> nn.Module:
    return resnet50(depth=101)


PUBLISHED_PARAMETERS = {
    vgg16: 138_357_544,
    vgg19: 143_667_240,
    resnet18: 11_689_512,
    resnet50: 25_557_032,
    resnet101: 44_549_160,
    mobilenet_v2: 3_504_872,
    googlenet: 13_004_888,  # with both auxiliary heads
    unet: 17_267_393,
    gpt2: 124_439_808,
    vit: 86_567_656,
    llama: 6_738_415_616,
    t5: 222_903_552,
    diffusion_unet: 35_746_307,
}


@pytest.mark.parametrize("factory", PUBLISHED_PARAMETERS, ids=lambda f: f.__name__)
def test_networks_have_the_published_number_of_parameters(factory: Any) -> None:
    with torch.device("meta"):
        made = factory()
    model = made[0] if isinstance(made, tuple) else made
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED_PARAMETERS[factory]


def test_llama_attends_as_defined() -> None:
    """One layer of attention against complex numbers that turn, and weights written out."""
    torch.manual_seed(0)
    batch, length, n_heads, n_groups, size = 2, 7, 4, 2, 6
    model = llama(
        batch, length, vocabulary=11, width=n_heads * size, hidden=16, n_layers=1, n_heads=n_heads, n_groups=n_groups
    )[0].double()
    layer = model.blocks[0].attention
    x = torch.randn(batch, length, n_heads * size, dtype=torch.float64)
    turn = torch.tensor([[10_000 ** (-2 * c / size) for c in range(size // 2)]], dtype=torch.float64)
    turn = torch.polar(torch.ones(length, size // 2, dtype=torch.float64), torch.arange(length)[:, None] * turn)

    def turned(y: torch.Tensor) -> torch.Tensor:
        return torch.complex(y[..., : size // 2], y[..., size // 2 :]) * turn

    outputs = []
    for head in range(n_heads):
        group = head // (n_heads // n_groups)
        query = turned((x @ layer.query.weight.T)[..., head * size : (head + 1) * size])
        key, value = (
            (x @ weight.T)[..., group * size : (group + 1) * size] for weight in (layer.key.weight, layer.value.weight)
        )
        scores = (query @ turned(key).conj().transpose(1, 2)).real / size**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        outputs.append(scores.softmax(-1) @ value)
    expected = torch.cat(outputs, -1) @ layer.project.weight.T
    assert torch.allclose(layer(x, *model._angles(length, x)), expected, atol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_t5_is_that_of_transformers(gated: bool) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}
    kind = "gated-gelu" if gated else "relu"
    theirs = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, feed_forward_proj=kind, tie_word_embeddings=not gated)
    ).eval()
    ours = t5(2, vocabulary=50, width=32, hidden=48, n_layers=2, n_heads=4, gated=gated, tied=not gated)[0].eval()
    names = {
        "shared": "tokens", "lm_head": "head", "block": "blocks", "final_layer_norm": "norm", "o": "project",
        "q": "query", "k": "key", "v": "value", "EncDecAttention": "reader", "SelfAttention": "attention",
        "DenseReluDense": "feed", "wi": "up", "wi_0": "gate", "wi_1": "up", "wo": "down",
    }  # fmt: skip
    ours.load_state_dict(_renamed_t5(theirs.state_dict(), names))
    ids, targets = torch.randint(0, 50, (2, 300)), torch.randint(0, 50, (2, 200))
    expected = theirs(input_ids=ids, decoder_input_ids=targets).logits
    assert torch.allclose(ours(ids, targets), expected, atol=1e-4)


def _renamed_t5(weights: dict[str, torch.Tensor], names: dict[str, str]) -> dict[str, torch.Tensor]:
    """The weights of transformers' T5 under our names."""
    renamed = {}
    for key, weight in weights.items():
        parts = key.split(".")
        if "relative_attention_bias" in parts:
            renamed[f"{parts[0]}.bias.weight"] = weight
        elif parts[1] == "embed_tokens":
            assert torch.equal(weight, weights["shared.weight"])
        elif parts[-2] == "layer_norm":
            place = int(parts[4])
            last = 1 if parts[0] == "encoder" else 2
            norm = "norm_1" if place == 0 else "norm_2" if place == last else "norm_read"
            renamed[f"{parts[0]}.blocks.{parts[2]}.{norm}.weight"] = weight
        else:
            parts = [*parts[:3], *parts[5:]] if "layer" in parts else parts
            renamed[".".join(names.get(part, part) for part in parts)] = weight
    return renamed


IMAGE, IDS = torch.zeros(2, 3, 64, 64), torch.zeros(2, 64, dtype=torch.long)
TINY_T5 = {"vocabulary": 99, "width": 64, "hidden": 96, "n_layers": 1, "n_heads": 4, "gated": True}
TINY_DIFFUSION = {"input_size": (3, 64, 64), "width": 32, "multipliers": (1, 2), "n_blocks": 1, "attention": (32,)}
NETWORKS = {
    "vgg16": (vgg16, (IMAGE,)),
    "resnet18": (resnet18, (IMAGE,)),
    "unet": (lambda: unet(width=8), (IMAGE,)),
    "gpt2": (lambda: gpt2(n_layers=1)[0], (IDS, IDS)),
    "llama": (lambda: llama(vocabulary=99, width=64, hidden=96, n_layers=1, n_heads=4, n_groups=2)[0], (IDS, IDS)),
    "t5": (lambda: t5(**TINY_T5)[0], (IDS, IDS, IDS)),
    "diffusion_unet": (lambda: diffusion_unet(**TINY_DIFFUSION)[0], (IMAGE, IDS[:, 0], IMAGE)),
    "vit": (lambda: vit(input_size=(3, 64, 64), n_layers=1), (IMAGE,)),
    "resnet50": (resnet50, (IMAGE,)),
    "mobilenet_v2": (mobilenet_v2, (IMAGE,)),
    "googlenet": (lambda: googlenet()[0], (IMAGE, IDS[:, 0])),
    "unet_bilinear": (lambda: unet(upsampling="bilinear"), (IMAGE,)),
    "gpt2_full": (lambda: gpt2()[0], (IDS, IDS)),
}
SLOW = ("unet", "resnet50", "mobilenet_v2", "googlenet", "unet_bilinear", "gpt2_full")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in NETWORKS])
def test_flops_and_gradient_bytes(name: str) -> None:
    factory, args = NETWORKS[name]
    with torch.device("meta"):
        model = factory()
    build._materialize(model)
    graph = frontend.training_graph_of(model, args, name=name)
    loss_bytes = 4
    kept = sum(value.bytes for value in graph.values if value.keep)
    assert kept == sum(p.numel() * p.element_size() for p in model.parameters()) + loss_bytes
    assert {op.kind for op in graph.operations if op.work is None or op.work.flops is None} == set()
    assert graph.loss is not None
    assert not graph.operations[graph.loss].is_backward

    step, step_args = build.loss_step(model, args, None)
    mode = torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Counter() as counter:
        step(*map(mode.from_tensor, step_args)).backward()
    assert frontend.counted_flops(graph) == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_counted_flops_of_a_depthwise_convolution_by_hand() -> None:
    model = nn.Conv2d(6, 6, 3, padding=1, groups=6)
    graph = frontend.training_graph_of(model, (torch.zeros(2, 6, 8, 8, requires_grad=True),), name="depthwise")
    forward = 2 * 2 * 6 * 8 * 8 * 9
    assert frontend.counted_flops(graph) == 3 * forward


def spec_of(target: str, **changes: Any) -> spec.ModelSpec:
    fields: dict[str, Any] = {"name": "x", "framework": "torch", "batch_size": 2, "input_size": (3, 32, 32)}
    return spec.ModelSpec(**fields | {"target": target} | changes)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak memory from Linux's /proc")
def test_extract_takes_no_memory_and_is_fast() -> None:
    """VGG16 at batch 256 stores 20 GB; extraction allocates none of it."""
    # Not getrusage: what it reports of a child starts at what its parent had.
    code = """
        from pathlib import Path
        import remat
        from remat.extraction import extract
        from remat.frontends.spec import ModelSpec
        g = extract(ModelSpec('vgg', 'torch', 'remat.torch.networks.vgg:vgg16', 256, (3, 224, 224)))
        peak = remat.simulate(g, remat.Plan.from_order(g, range(len(g)))).peak_bytes
        status = Path('/proc/self/status').read_text()
        print(g.name, g.fixed_bytes, peak, int(status.split('VmHWM:')[1].split()[0]) // 1000)
    """
    name, fixed, peak, resident_mb = run_python(code).split()
    assert name == "vgg_b256"
    assert int(fixed) == 4 * 138_357_544 + 256 * 3 * 224 * 224 * 4 + 256 * 8 + 4
    assert int(peak) > 15e9
    assert int(resident_mb) < 1500


def test_unet_matches_the_published_profile(instances: Path) -> None:
    """Forward activations of MONeT's U-Net, by kind and bytes, in order; and its parameters and buffers."""
    published = json.loads((instances / "p100" / "unet_b11.json").read_text())
    names = {"convolution": "convolution", "batch_norm": "batch_norm", "relu": "relu", "max_pool2d": "max_pool2d"}
    names |= {"cat": "cat", "adaptive_avg_pool2d": "adaptive_avg_pool2d"}

    def kind(text: str) -> str:
        return next((n for n in names if n in text), "")

    want = [(kind(n["op"]), n["bytes"]) for n in published["nodes"] if not n["backward"] and kind(n["op"])]
    graph = extraction.extract(spec_of("remat.torch.networks.unet:unet", batch_size=11, input_size=(3, 416, 608)))
    got = [
        (kind(op.kind), graph.values[op.outputs[0]].bytes)
        for op in graph.operations
        if not op.is_backward and kind(op.kind)
    ]
    assert got == want
    gradients = sum(value.bytes for value in graph.values if value.keep) - 4
    assert graph.fixed_bytes + gradients == pytest.approx(published["fixed_bytes"], abs=512)


def breaks_the_graph() -> nn.Module:
    return Applies(lambda self, x: self.a(x) if x.sum() > 0 else x, 32)


def frozen() -> nn.Module:
    return nn.Linear(32, 4).requires_grad_(False)


def needs_numbers() -> nn.Module:
    model = classifier()
    assert model[1].weight.sum().item() != 0  # fails on the meta device
    return model


def wrong_size() -> nn.Module:
    return nn.Linear(7, 4)


def classifier(classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, classes))


@pytest.mark.parametrize(
    ("factory", "changes", "word"),
    [
        ("breaks_the_graph", {}, "the model looks at values .*: control flow and shapes must not depend on them"),
        ("frozen", {}, "gradient"),
        ("wrong_size", {}, "sample input"),
        (
            "classifier", {"options": {"clases": 3}},
            r"'clases'; options of the factory \(of a run: model\.options\.NAME\): classes=4$",
        ),
        ("classifier", {"options": {"loss": "crossentropy"}}, "cross_entropy"),
        ("classifier", {"dtype": "float31"}, "float32"),
        ("classifier", {"input_size": ()}, "input_size"),
        ("classifier", {"target": ""}, "package.module:factory"),
    ],
)  # fmt: skip
def test_user_errors_are_one_line(factory: str, changes: dict[str, Any], word: str) -> None:
    with refused(word):
        extraction.extract(spec_of(**{"target": f"{__name__}:{factory}", **changes}))


def test_dtype_and_options_reach_the_model() -> None:
    target = f"{__name__}:classifier"
    single = extraction.extract(spec_of(target, options={"classes": 6}))
    half = extraction.extract(spec_of(target, options={"classes": 6}, dtype="bfloat16"))
    logits = next(op for op in single.operations if op.kind == "aten.addmm")
    assert single.values[logits.outputs[0]].bytes == 2 * 6 * 4
    assert half.values[logits.outputs[0]].bytes == 2 * 6 * 2
    assert {op.work.dtype for op in half.operations if op.kind == "aten.addmm"} == {"bfloat16"}


def half_alone() -> nn.Module:
    return classifier().to(torch.bfloat16)


def half_with_arguments() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return half_alone(), (torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16),)


@pytest.mark.parametrize("factory", ["half_alone", "half_with_arguments"])
def test_types_are_those_of_the_factory_unless_others_are_asked_for(factory: str) -> None:
    target = f"{__name__}:{factory}"
    plain = frontend.training_graph_of(half_alone(), (torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16),), name="plain")
    own, cast = (extraction.extract(spec_of(target, dtype=dtype)) for dtype in (None, "float32"))
    assert own.sha256() == plain.sha256()
    assert {op.work.dtype for op in cast.operations if op.work} <= {"float32", "int64"}
    assert cast.fixed_bytes > 1.9 * own.fixed_bytes


def test_the_graph_of_an_own_model_is_named_by_its_factory() -> None:
    target = f"{__name__}:classifier"
    assert extraction.extract(spec_of(target, name=target)).name == f"{target}, batch 2"
    assert extraction.extract(spec_of(target, name="torch_small")).name == "torch_small_b2"


def test_a_factory_that_needs_numbers_is_run_for_real() -> None:
    assert len(extraction.extract(spec_of(f"{__name__}:needs_numbers"))) > 4


def test_missing_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("remat.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(remat.MissingPackage, match="pip install"):
        extraction.extract(spec_of("remat.torch.networks.vgg:vgg16"))
