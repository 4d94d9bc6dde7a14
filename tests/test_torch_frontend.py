"""Training graphs of PyTorch models against eager PyTorch, its FLOP counter and hand-computed values."""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused, run_python
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop
from torch_helpers import Applies

import remat
from remat import extraction
from remat.frontends import spec
from remat.torch.frontend import build
from remat.torch.frontend import graphs as frontend
from remat.torch.networks.diffusion_unet import diffusion_unet
from remat.torch.networks.googlenet import googlenet
from remat.torch.networks.llama import llama
from remat.torch.networks.mobilenet_v2 import mobilenet_v2
from remat.torch.networks.resnet import resnet50
from remat.torch.networks.t5 import t5
from remat.torch.networks.transformer import gpt2, vit
from remat.torch.networks.unet import unet
from remat.torch.networks.vgg import vgg16, vgg19

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
    arguments = [([4], [1]), ([5, 3], [3, 1]), ([3, 4], [1, 3])]  # bias, x, weight
    assert signature["args"] == [{"t": sizes, "s": strides, "d": "float32"} for sizes, strides in arguments]
    assert (signature["fw"], signature["op"], signature["kwargs"]) == ("torch", "aten.addmm.default", {})


def graph_of(model: nn.Module, *args: torch.Tensor) -> remat.Graph:
    """The graph, whose capture leaves the model as it is."""
    before = {name: t.detach().clone() for name, t in model.state_dict().items()}
    graph = frontend.training_graph_of(model, args, name="graph")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return graph


def test_reader_of_an_overwritten_buffer_runs_once() -> None:
    def drifting(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.a(x) + self.level)
        self.level.mul_(0.5)
        return self.a(x)

    graph = graph_of(Applies(drifting, 6, level=torch.ones(6)), torch.randn(3, 6))
    assert [op.kind for op in graph.operations if op.run_once] == ["aten.add", "remat.update_buffers"]


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
    """PyTorch's counter, which ignores the CPU's fused attention."""

    def __init__(self) -> None:
        def attention(q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return sdpa_flop(q, k, v)

        def attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
            return sdpa_backward_flop(grad, q, k, v)

        fused = aten._scaled_dot_product_flash_attention_for_cpu
        rules = {fused: attention, aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward}
        super().__init__(display=False, custom_mapping=rules)


PUBLISHED_PARAMETERS = [
    (vgg16, 138_357_544), (vgg19, 143_667_240), (partial(resnet50, depth=18), 11_689_512), (resnet50, 25_557_032),
    (partial(resnet50, depth=101), 44_549_160), (mobilenet_v2, 3_504_872),
    (googlenet, 13_004_888),  # with both auxiliary heads
    (unet, 17_267_393), (gpt2, 124_439_808), (vit, 86_567_656), (llama, 6_738_415_616), (t5, 222_903_552),
    (diffusion_unet, 35_746_307),
]  # fmt: skip


@pytest.mark.parametrize(("factory", "n"), PUBLISHED_PARAMETERS)
def test_networks_have_the_published_number_of_parameters(factory: Any, n: int) -> None:
    with torch.device("meta"):
        made = factory()
    model = made[0] if isinstance(made, tuple) else made
    assert sum(p.numel() for p in model.parameters()) == n


OF_LLAMA = {  # part of a name in transformers -> in this project
    r"model\.embed_tokens": "tokens", r"model\.layers": "blocks", "self_attn": "attention", "mlp": "feed",
    "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", r"model\.norm": "norm", "lm_head": "head",
    "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "project", "(gate|up|down)_proj": r"\1",
}  # fmt: skip
OF_T5 = {
    r"layer\.0\.layer_norm": "norm_1", r"(encoder.*)layer\.1\.layer_norm": r"\1norm_2",
    r"layer\.1\.layer_norm": "norm_read", r"layer\.2\.layer_norm": "norm_2", "final_layer_norm": "norm",
    r"block\.0\.layer\.0\.SelfAttention\.relative_attention_bias": "bias", r"block\.": "blocks.", r"layer\.\d\.": "",
    "SelfAttention": "attention", "EncDecAttention": "reader", "DenseReluDense": "feed", r"\bq\b": "query",
    r"\bk\b": "key", r"\bv\b": "value", r"\bo\b": "project", "wi_0": "gate", r"wi(_1)?\b": "up", r"\bwo\b": "down",
    "shared": "tokens", "lm_head": "head",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "t5", "gated t5"])
def test_language_models_are_those_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids, targets = torch.randint(0, 50, (2, 300)), torch.randint(0, 50, (2, 200))
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.LlamaConfig(**sizes, vocab_size=50, num_key_value_heads=2, rms_norm_eps=1e-5)
        theirs, names = transformers.LlamaForCausalLM(config).eval(), OF_LLAMA
        ours = llama(2, vocabulary=50, width=32, hidden=48, n_layers=2, n_heads=4, n_groups=2)[0]
        found, expected = (lambda: ours(ids)), theirs(ids).logits
    else:
        sizes = {"vocab_size": 50, "d_model": 32, "d_ff": 48, "d_kv": 8, "num_heads": 4, "num_layers": 2}
        gated, names = kind != "t5", OF_T5
        feed = "gated-gelu" if gated else "relu"
        config = transformers.T5Config(**sizes, feed_forward_proj=feed, tie_word_embeddings=not gated)
        theirs = transformers.T5ForConditionalGeneration(config).eval()
        ours = t5(2, vocabulary=50, width=32, hidden=48, n_layers=2, n_heads=4, gated=gated, tied=not gated)[0].eval()
        found, expected = (lambda: ours(ids, targets)), theirs(input_ids=ids, decoder_input_ids=targets).logits
    weights = {}
    for name, weight in theirs.state_dict().items():
        if kind == "llama" or "embed_tokens" not in name:
            weights[functools.reduce(lambda found, each: re.sub(*each, found), names.items(), name)] = weight
    ours.load_state_dict(weights)
    assert torch.allclose(found(), expected, atol=1e-4)


IMAGE, IDS = torch.zeros(2, 3, 64, 64), torch.zeros(2, 64, dtype=torch.long)
TINY_T5 = {"vocabulary": 99, "width": 64, "hidden": 96, "n_layers": 1, "n_heads": 4, "gated": True}
TINY_DIFFUSION = {"input_size": (3, 64, 64), "width": 32, "multipliers": (1, 2), "n_blocks": 1, "attention": (32,)}
NETWORKS = {
    "vgg16": (vgg16, (IMAGE,)),
    "resnet18": (partial(resnet50, depth=18), (IMAGE,)),
    "gpt2": (lambda: gpt2(n_layers=1)[0], (IDS, IDS)),
    "llama": (lambda: llama(vocabulary=99, width=64, hidden=96, n_layers=1, n_heads=4, n_groups=2)[0], (IDS, IDS)),
    "t5": (lambda: t5(**TINY_T5)[0], (IDS, IDS, IDS)),
    "diffusion_unet": (lambda: diffusion_unet(**TINY_DIFFUSION)[0], (IMAGE, IDS[:, 0], IMAGE)),
    "vit": (lambda: vit(input_size=(3, 64, 64), n_layers=1), (IMAGE,)),
    "unet_bilinear": (lambda: unet(width=4, upsampling="bilinear"), (IMAGE,)),
}


@pytest.mark.parametrize("name", NETWORKS)
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
    names = "convolution", "batch_norm", "relu", "max_pool2d", "cat", "adaptive_avg_pool2d"

    def kind(text: str) -> str:
        return next((n for n in names if n in text), "")

    want = [(kind(n["op"]), n["bytes"]) for n in published["nodes"] if not n["backward"] and kind(n["op"])]
    graph = extraction.extract(spec_of("remat.torch.networks.unet:unet", batch_size=11, input_size=(3, 416, 608)))
    forward = [op for op in graph.operations if not op.is_backward and kind(op.kind)]
    assert [(kind(op.kind), graph.values[op.outputs[0]].bytes) for op in forward] == want
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


def test_dtype_options_and_name_reach_the_graph() -> None:
    target = f"{__name__}:classifier"
    single, half = (
        extraction.extract(spec_of(target, name=name, options={"classes": 6}, dtype=dtype))
        for name, dtype in ((target, None), ("torch_small", "bfloat16"))
    )
    assert (single.name, half.name) == (f"{target}, batch 2", "torch_small_b2")  # an own model is named by its factory
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


def test_a_factory_that_needs_numbers_is_run_for_real() -> None:
    assert len(extraction.extract(spec_of(f"{__name__}:needs_numbers"))) > 4


def test_missing_torch_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("remat.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(remat.MissingPackage, match="pip install"):
        extraction.extract(spec_of("remat.torch.networks.vgg:vgg16"))
