"""`explain` of a configuration of transformers, with adapters and precisions by name; and of many GPUs at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import refused

pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch  # noqa: E402

import remat.torch as rt  # noqa: E402
from remat.cli import main  # noqa: E402
from remat.cost import load_gpu  # noqa: E402
from remat.torch.explaining.configured import LanguageModel  # noqa: E402
from remat.torch.explaining.factory import StepFactory  # noqa: E402
from remat.torch.explaining.gpu_kernels import kernels_of  # noqa: E402
from remat.torch.explaining.training import Training  # noqa: E402
from remat.torch.frontend import build  # noqa: E402
from remat.torch.frontend.graphs import described_graph  # noqa: E402
from remat.torch.frontend.repeated import LEAST  # noqa: E402
from remat.torch.measuring.measure import peak_of_step  # noqa: E402
from remat.torch.resident.optimizer import state_bytes  # noqa: E402

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 300, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
SIZES = {"batch_size": 2, "length": 48}


def written(folder: Path, content: Any) -> Path:
    file = folder / "config.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


@pytest.mark.parametrize(
    ("content", "lora", "precision"),
    [(LLAMA, 4, "mixed"), (GPT2, None, "bf16")],
)
def test_the_plain_peak_is_that_of_a_real_step(content, lora, precision, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(StepFactory, "growing", lambda self: iter(()))  # its largest sizes take most of the time
    training = Training(precision, lora)
    told = rt.explain(
        rt.from_config(written(tmp_path, content)), gpu="cpu", budget="1GB", optimizer=None, time_limit_s=0.1,
        precision=precision, lora=lora, **SIZES,
    )  # fmt: skip
    config = transformers.AutoConfig.for_model(**content)
    config.use_cache = False
    model = LanguageModel(transformers.AutoModelForCausalLM.from_config(config).train())
    model.to(getattr(torch, training.dtype or "float32"))
    training.prepare(model)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)  # adapters are made without values
    ids = torch.randint(300, (2, 48))
    step, args = build.loss_step(model, (ids, ids.clone()), None, training.autocast)
    measured = told.graph.fixed_bytes + peak_of_step(step, args, {}, "cpu")
    assert told.plain_peak_bytes == pytest.approx(measured, rel=0.005)
    trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    assert told.bytes_of["gradients"] == trained
    assert ("LoRA of rank 4 beside" in told.trained) == (lora is not None)


@pytest.mark.slow
def test_a_batch_of_one_may_run_other_operations_than_larger_ones(tmp_path) -> None:
    factory = rt.from_config(written(tmp_path, LLAMA | {"num_hidden_layers": LEAST}))

    def explained(batch_size: int, budget: int | str) -> rt.Explanation:
        given: dict[str, Any] = {"gpu": "cpu", "length": 64, "optimizer": None, "time_limit_s": 0.1}
        return rt.explain(factory, budget=budget, batch_size=batch_size, **given)

    one, two = (explained(n, "40MB") for n in (1, 2))
    assert len(one.graph) != len(two.graph)  # as long as positions are computed otherwise for a batch of one
    assert one.largest["batch"][0.0] == two.largest["batch"][0.0] > 2
    assert one.largest["batch"][0.0] < one.largest["batch"][0.2]
    assert explained(1, two.plain_peak_bytes - 1).largest["batch"][0.0] == 1


def test_a_factory_keeps_its_model_for_each_rank(tmp_path) -> None:
    make = rt.from_config(written(tmp_path, LLAMA))
    made = {rank: make(lora=rank)[0] for rank in (None, 2, 4)}
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in made.values()]
    assert counts[0] == sum(p.numel() for p in made[None].parameters())
    assert counts[2] == 2 * counts[1]
    assert make(lora=2, batch_size=3)[0] is made[2]


@pytest.mark.slow
def test_blocks_with_adapters_are_captured_once(tmp_path) -> None:
    """The first block's inputs need no gradient, so that its backward pass is shorter."""
    make = rt.from_config(written(tmp_path, LLAMA | {"num_hidden_layers": LEAST}))
    made, known, model = StepFactory(make, SIZES, load_gpu("h100"), training=Training(lora=4)).step({})
    assert made.captured == f"6 of {LEAST} equal blocks, the others as copies"
    with kernels_of(load_gpu("h100")):
        whole = described_graph(model, made.args[:2], name="step", repeats=False)
    assert [(op.kind, op.inputs) for op in known.graph.operations] == [
        (op.kind, op.inputs) for op in whole.graph.operations
    ]


def test_states_by_rule() -> None:
    parameters = [torch.nn.Parameter(torch.ones(*shape)) for shape in ((64, 128), (100,))]
    optimizer = torch.optim.Adafactor(parameters)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert state_bytes("adafactor", parameters) == sum(x.numel() * x.element_size() for x in tensors)
    assert state_bytes("adamw8bit", parameters) == 2 * (8192 + 4 * 32) + 8 * 100  # small ones stay in float32


def test_many_gpus_at_once(tmp_path) -> None:
    large = LLAMA | {"vocab_size": 2_000_000, "hidden_size": 640}
    found = rt.compare(
        rt.from_config(written(tmp_path, large)), ["t4", "h100", "k80", "l40s"], optimizer="24GB", time_limit_s=0.1,
        prices={"h100": 2.5, "l40s": "0.9/h"}, batch_size=2, length=16,
    )  # fmt: skip
    names = [each.gpu.name for each in found.gpus]
    assert names == ["k80", "t4", "l40s", "h100"]
    small, other = found.gpus[:2]
    assert small.plain_peak_bytes is None  # nothing is captured for GPUs that the parameters fill
    assert small.least_bytes == other.least_bytes > 24e9
    assert found.smallest is found.smallest_plain is found.gpus[2]
    assert all(each.step_price == each.price * each.step_s / 3600 for each in found.gpus[2:])
    assert found.cheapest in found.gpus[2:]
    text = str(found)
    assert "k80" in text
    assert "no, at least" in text
    assert "smallest that fits: l40s" in text


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"hidden_size": 3}, "--gpu h100", "it names no model_type"),
        ({"model_type": "lama"}, "--gpu h100", "unknown model_type of a language model 'lama'; did you mean llama"),
        ({"model_type": "vit"}, "--gpu h100", "vit is no language model"),
        ("[1,", "--gpu h100", "cannot be read as JSON"),
        (LLAMA | {"num_attention_heads": 7}, "--gpu h100", "is not a multiple of the number of attention heads"),
        (LLAMA, "--gpu h100 --lora 0", "lora must be the rank of the adapters"),
        (LLAMA, "--gpu h100 --precision fp8", "unknown precision 'fp8'; did you mean fp32"),
        (LLAMA, "--gpu h100 --optimizer adafacto", "did you mean adafactor"),
        (LLAMA, "--gpus h100,l4s", "unknown gpu 'l4s'; did you mean"),
        (LLAMA, "--gpus h100 --price h100=2.5", "the price '2.5' of h100 has no unit: write h100=2.5/h"),
        (LLAMA, "--gpus h100 --price l4=2/h", "unknown gpu of a price 'l4'"),
        (LLAMA, "--gpus h100 --price 2.5/h", "write one for each GPU, e.g. --price h100=2.5/h"),
        (LLAMA, "--price h100=2.5/h", "--price goes with --gpus"),
        (LLAMA, "--gpus all --out page.html", "--out is for one GPU"),
        (LLAMA, "--gpus all --implementations joint", "--implementations is for one GPU"),
        (LLAMA | {"architectures": 5}, "--gpu h100 --length 0", "length must be a positive integer"),
        (GPT2, "--gpu h100 --length 65", "has a table of 64 positions; length=65 needs more"),
    ],
)
def test_a_mistake_is_one_line(content: Any, options: str, message: str, tmp_path, capsys) -> None:
    assert main(["explain", "--config", str(written(tmp_path, content)), *options.split()]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_factory_or_a_configuration_is_needed(capsys) -> None:
    assert main(["explain", "--gpu", "h100"]) == 1
    assert "name a factory" in capsys.readouterr().err
    with refused("lora= needs blocks in a row"):
        Training(lora=2).prepare(torch.nn.Linear(2, 2))
