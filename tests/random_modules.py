"""Random PyTorch modules against PyTorch's own step: the bits of three optimizer steps, and the promised peak.

`check` makes one module from its seed and runs it under three budgets, each of which lies between what is always there
and the plain step's peak.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch_helpers
from random_loops import Loop, attach, differentiable, loop_of, squares
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_map

import remat
import remat.torch as rt
from remat.torch.measuring.measure import measured_peak, undone
from remat.torch.planning.planner import there_before

UNTRAINABLE = RuntimeError, AssertionError, ValueError, TypeError, IndexError
SHARES = (0.95, 0.85, 0.7)  # of what the plain step adds to what is always there
STEPS = 3
MOST_OFF = 0.02  # of the predicted peak
ROUNDING_BYTES = 64  # of PyTorch's allocator on a CPU
CACHE = Path(tempfile.gettempdir()) / "remat_random_modules"  # measured workspaces, shared by the cases

Make = Callable[[random.Random, "Shape"], nn.Module]


@dataclass(frozen=True)
class Case:
    """A module and how it is trained.

    Attributes:
        context: entered around the forward pass.
        parts: kinds of what it is made of, for people.
        loop: how it is trained.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    parts: tuple[str, ...]
    loop: Loop


def check(seed: int) -> str:
    """The outcome of the case of that seed, see ``fuzz.py``."""
    case = make(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, there = copy.deepcopy(case), _there(case)
        attach(plain.model, plain.loop.hooks)
        peak = there + _measured(plain.model, plain)
        outcomes = []
        for share in SHARES:
            try:
                outcomes.append(_under(case, there + int(share * (peak - there)), seed))
            except remat.InvalidInput as error:
                outcomes.append(_refusal(str(error)))
    defects = [outcome for outcome in outcomes if not outcome.startswith(("ok", "refused"))]
    refused = [outcome for outcome in outcomes if outcome.startswith("refused")]
    if defects:
        return f"{defects[0]} [{' '.join(case.loop.names)}: {' '.join(case.parts)}]"
    if not refused:
        return SAID if SAID in outcomes else "ok"
    n = refused.count(NO_PLAN)
    return f"{NO_PLAN} at {n} of {len(SHARES)} budgets" if n else refused[0]


NO_PLAN = "refused: no plan"
SAID = "ok: 1 warned that sums of gradients differ"


def _under(case: Case, budget_bytes: int, seed: int) -> str:
    plain, ours = copy.deepcopy(case), copy.deepcopy(case)
    for each in (plain, ours):
        attach(each.model, each.loop.hooks)
    with ours.context():
        module = torch_helpers.rematerialize(
            ours.model, ours.args, budget_bytes, sample_kwargs=ours.kwargs, cache_folder=CACHE, **ours.loop.options
        )
    changed = _unlike(_state(plain.model), _state(ours.model))
    if changed:
        return f"different: planning changes {changed}"
    warnings.simplefilter("always")  # as in a new process
    with warnings.catch_warnings(record=True) as told:
        outcome = _peak(module, ours, budget_bytes, told)
    if outcome != "ok":
        return outcome
    for step in range(STEPS):
        theirs, mine = _step(plain.model, plain, seed + step), _step(module, ours, seed + step)
        unlike = _unlike(theirs, mine)
        if unlike and _is_said(theirs, mine, told, "autocast" in case.parts):
            return SAID
        if unlike:
            return f"different: {unlike} in step {step + 1}"
    return _peak(module, ours, budget_bytes, told, " after training")


def _peak(
    module: rt.Rematerialized, case: Case, budget_bytes: int, told: list[warnings.WarningMessage], when: str = ""
) -> str:  # fmt: skip
    needs = there_before(module.plan) + _measured(module, case)
    predicted = module.predicted_peak_bytes
    if not case.loop.is_counted or any("retain_graph" in str(each.message) for each in told):
        return "ok"
    if needs > budget_bytes + ROUNDING_BYTES:
        return f"over budget: by {needs / budget_bytes - 1:.2%}{when}, {needs - budget_bytes} bytes"
    if case.loop.backward_passes > 1 and not case.loop.retain_is_told:
        return "ok"  # within the budget by luck
    if when and _state(case.model):  # a step that reads the state of the step before has a plan of its own
        return "ok"
    most_off = MOST_OFF * predicted
    is_exact = case.loop.is_exact and "views" not in case.parts  # whose gradients are added up in several ways
    is_exact = is_exact and _reads_all(case)
    if needs - predicted > most_off or (is_exact and predicted - needs > most_off):
        return f"wrong prediction: {needs / predicted:.3f} of {predicted} bytes{when}"
    return "ok"


def _reads_all(case: Case) -> bool:
    """Whether the loss differentiates all outputs; for others the plan may count a gradient that is not there."""
    tried = copy.deepcopy(case)
    with tried.context():
        outputs = tried.model(*tried.args, **tried.kwargs)
        found = [x.detach().requires_grad_() for x in differentiable(outputs)]
        stands_for = dict(zip(map(id, differentiable(outputs)), found, strict=True))
        loss = tried.loop.of(tree_map(lambda x: stands_for.get(id(x), x), outputs))
    return all(g is not None for g in torch.autograd.grad(loss, found, allow_unused=True))


def _measured(model: nn.Module, case: Case) -> int:
    """Peak of a step of the loop, beside what was there; gradients, buffers, attributes and random numbers stay."""
    peak = 0
    for _ in range(2):  # the first step compiles and chooses kernels
        with undone(model, case.args, case.kwargs, "cpu") as leaves:
            for x in leaves:
                x.grad = None
            peak = measured_peak(lambda: case.loop.run(model, case.args, case.kwargs, case.context()))
    return peak


def _refusal(message: str) -> str:
    """The reason, without what is only of this case."""
    if message.startswith("no plan of"):
        return NO_PLAN
    reason = re.sub(r"'[^']*'|\"[^\"]*\"", "...", message.splitlines()[0])
    return f"refused: {re.sub(r'[0-9]+', 'N', reason)[:90]}"


def _there(case: Case) -> int:
    named = case.model.state_dict(keep_vars=True).values(), case.model.parameters(), case.model.buffers()
    tensors = [*itertools.chain(*named), *tree_leaves((case.args, case.kwargs))]
    storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _step(model: nn.Module, case: Case, seed: int) -> dict[str, Tensor]:
    leaves = [x for x in tree_leaves((case.args, case.kwargs)) if isinstance(x, Tensor) and x.requires_grad]
    for x in (*model.parameters(), *leaves):
        x.grad = None
    torch.manual_seed(seed)
    outputs, loss = case.loop.run(model, case.args, case.kwargs, case.context())
    left = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    left |= {f"output {i}": x.detach() for i, x in enumerate(tree_leaves(outputs)) if isinstance(x, Tensor)}
    left |= {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    left |= {f"gradient of input {i}": x.grad for i, x in enumerate(leaves)}
    left |= {f"buffer {name}": b for name, b in model.named_buffers()} | _state(model)
    if case.loop.keeps_gradients:
        left |= {f"gradient of output {i}": x.grad for i, x in enumerate(differentiable(outputs)) if not x.is_leaf}
    left = {name: x.clone() for name, x in left.items() if x is not None}
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(p.grad.clamp(-1, 1), alpha=0.05)  # so that nothing diverges
    return left | {f"parameter {name}": p.detach().clone() for name, p in model.named_parameters()}


STATE = "state"  # name of the attribute in which parts keep what moves from step to step


def _state(model: nn.Module) -> dict[str, Tensor]:
    held = [(name, m.__dict__[STATE]) for name, m in model.named_modules() if STATE in m.__dict__]
    leaves = ((f"state {i} of {name}", x) for name, state in held for i, x in enumerate(tree_leaves(state)))
    return {name: torch.as_tensor(x).detach() for name, x in leaves if x is not None}


def _unlike(theirs: dict[str, Tensor], mine: dict[str, Tensor]) -> str:
    """Names of what differs in a bit; '' if nothing does."""
    if theirs.keys() != mine.keys():
        return f"{sorted(theirs.keys() ^ mine.keys())} on one side only"
    names = _names_unlike(theirs, mine)
    if not names:
        return ""
    both = [(theirs[name].double(), mine[name].double()) for name in names]
    most = max(float((a - b).abs().max()) for a, b in both)
    return f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''} by at most {most:.1e}"


def _names_unlike(theirs: dict[str, Tensor], mine: dict[str, Tensor]) -> list[str]:
    return [name for name, x in theirs.items() if not _same_bits(x, mine[name])]


def _is_said(
    theirs: dict[str, Tensor], mine: dict[str, Tensor], told: list[warnings.WarningMessage], is_cast: bool
) -> bool:  # fmt: skip
    """Whether only gradients differ, by their last bits, and a warning said so."""
    if theirs.keys() != mine.keys() or not any("in another order" in str(each.message) for each in told):
        return False
    names = _names_unlike(theirs, mine)
    are_near = all(_is_near(theirs[name], mine[name], is_cast) for name in names)
    return are_near and all(name.startswith(("gradient of", "parameter")) for name in names)


def _is_near(one: Tensor, other: Tensor, is_cast: bool) -> bool:
    last_bits = 16 * torch.finfo(torch.bfloat16 if is_cast else one.dtype).eps
    return bool((one - other).abs().max() <= last_bits * max(1.0, float(one.abs().max())))


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


# What modules are made of. A part takes a tensor and returns one: an image (batch, channels, height, width), a sequence
# (batch, steps, width) or rows (batch, width). Those of another shape than the one they get are made from `Shape`.


@dataclass(frozen=True)
class Shape:
    """Of a tensor between two parts.

    Attributes:
        kind: ``image``, ``sequence`` or ``rows``.
    """

    kind: str
    sizes: tuple[int, ...]

    @property
    def width(self) -> int:
        """Features of a step or row; channels of an image."""
        return self.sizes[1] if self.kind == "image" else self.sizes[-1]


class Applies(torch_helpers.Applies):
    def __init__(self, function: Callable[..., Tensor], **parts: Any):
        super().__init__(function, 0, **parts)


PARTS: dict[str, dict[str, Make]] = {"image": {}, "sequence": {}, "rows": {}}


def _add(*kinds: str, **makers: Make) -> None:
    """Add parts for tensors of these kinds, by all kinds if none is named."""
    for kind in kinds or tuple(PARTS):
        PARTS[kind] |= makers


def part(*kinds: str) -> Callable[[Make], Make]:
    """Add what makes a part."""
    return lambda make: _add(*kinds, **{make.__name__: make}) or make


def _function(*kinds: str, **functions: Callable[[Any, Tensor], Tensor]) -> None:
    """Add parts that are a function alone."""
    _add(*kinds, **{name: lambda _rng, _shape, f=function: Applies(f) for name, function in functions.items()})


ACTIVATIONS: tuple[Callable[[bool], nn.Module], ...] = (
    nn.ReLU, nn.ReLU6, lambda i: nn.LeakyReLU(0.1, i), lambda i: nn.ELU(1.1, i), lambda i: nn.CELU(0.7, i),
    lambda i: nn.Hardtanh(-0.8, 0.9, i), nn.Hardswish, nn.Hardsigmoid, nn.SiLU, nn.Mish, nn.SELU,
    lambda i: nn.RReLU(0.1, 0.4, i), lambda i: nn.Threshold(0.1, 0.05, i), lambda _: nn.GELU(),
    lambda _: nn.GELU("tanh"), lambda _: nn.Softplus(), lambda _: nn.PReLU(), lambda _: nn.Tanh(),
    lambda _: nn.Sigmoid(), lambda _: nn.LogSigmoid(), lambda _: nn.Softsign(), lambda _: nn.Tanhshrink(),
    lambda _: nn.Softshrink(0.2), lambda _: nn.Hardshrink(0.2),
)  # fmt: skip


@part()
def dropout(rng: random.Random, shape: Shape) -> nn.Module:
    kinds = [nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout]
    kinds += [nn.Dropout2d] if shape.kind == "image" else [nn.Dropout1d] if shape.kind == "sequence" else []
    return rng.choice(kinds)(rng.choice([0.1, 0.25, 0.5]), inplace=rng.random() < 0.3)


@part("image")
def convolution(rng: random.Random, shape: Shape) -> nn.Module:
    channels, kernel = shape.width, rng.choice([1, 3, 5])
    groups = rng.choice([1, 1, channels, 2 if channels % 2 == 0 else 1])
    return nn.Conv2d(
        channels, channels * rng.choice([1, 1, 2]), kernel, stride=rng.choice([1, 1, 2]), padding=kernel // 2,
        groups=groups, bias=rng.random() < 0.7, padding_mode=rng.choice(["zeros", "zeros", "circular", "reflect"]),
    )  # fmt: skip


@part("image")
def norm_of_images(rng: random.Random, shape: Shape) -> nn.Module:
    n, affine = shape.width, rng.random() < 0.8
    return rng.choice([
        nn.BatchNorm2d(n, affine=affine), nn.BatchNorm2d(n, momentum=0.3, track_running_stats=rng.random() < 0.7),
        nn.GroupNorm(2 if n % 2 == 0 else 1, n, affine=affine), nn.InstanceNorm2d(n, affine=affine),
        nn.InstanceNorm2d(n, affine=affine, track_running_stats=True), nn.LocalResponseNorm(3),
        nn.LayerNorm(shape.sizes[2:]),
    ])  # fmt: skip


@part("image")
def pooling(rng: random.Random, shape: Shape) -> nn.Module:
    if min(shape.sizes[2:]) < 4:
        return nn.MaxPool2d(1)
    return rng.choice([
        nn.MaxPool2d(2), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(2), nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AdaptiveAvgPool2d(3), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
        nn.FractionalMaxPool2d(2, output_ratio=0.7),
    ])  # fmt: skip


@part("image")
def resizing(rng: random.Random, _shape: Shape) -> nn.Module:
    mode = rng.choice(["nearest", "bilinear", "bicubic", "nearest-exact"])
    factor = rng.choice([1.3, 2.0, 0.7])
    return Applies(lambda _, x: F.interpolate(x, scale_factor=factor, mode=mode))


@part("image", "rows")
def normalised_weights(rng: random.Random, shape: Shape) -> nn.Module:
    layer = nn.Conv2d(shape.width, shape.width, 3, padding=1) if shape.kind == "image" else nn.Linear(shape.width, 16)
    return rng.choice([parametrizations.spectral_norm, parametrizations.weight_norm])(layer)


_function(
    "image",
    channels_last=lambda _, x: x.contiguous(memory_format=torch.channels_last),
    transposed=lambda _, x: x.transpose(2, 3),
    shuffled=lambda _, x: F.channel_shuffle(x, 2) if x.shape[1] % 2 == 0 else x,
    padded=lambda _, x: F.pad(x, (1, 0, 1, 0), mode="replicate"),
    softmax_of_channels=lambda _, x: torch.softmax(x, 1),
    flipped=lambda _, x: x.flip(2) + x,
    corner_written=lambda _, x: _written(x, (slice(None), slice(None), 0), 0.5),
)


@part("sequence")
def recurrent(rng: random.Random, shape: Shape) -> nn.Module:
    both, layers = rng.random() < 0.3, rng.choice([1, 1, 2])
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    layer = kind(
        shape.width, rng.choice([8, 16]), layers, batch_first=True, bidirectional=both, bias=rng.random() < 0.8,
        dropout=0.3 if layers > 1 and rng.random() < 0.5 else 0.0,
    )  # fmt: skip
    return Applies(lambda self, x: self.layer(x)[0], layer=layer)


@part("sequence")
def cells(rng: random.Random, shape: Shape) -> nn.Module:
    """A loop of a recurrent cell, with dropout on its state."""
    kind, width = rng.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell]), rng.choice([8, 16])

    def function(self: Any, x: Tensor) -> Tensor:
        state, made = None, []
        for one in x.unbind(1):
            state = self.cell(one, state)
            hidden = state[0] if isinstance(state, tuple) else state
            made.append(F.dropout(hidden, self.p, self.training) if self.p else hidden)
        return torch.stack(made, 1)

    return Applies(function, cell=kind(shape.width, width), p=rng.choice([0.0, 0.0, 0.2]))


@part("sequence")
def attention(rng: random.Random, shape: Shape) -> nn.Module:
    heads = _heads(shape)
    if rng.random() < 0.4:
        layer = nn.MultiheadAttention(shape.width, heads, rng.choice([0.0, 0.1]), batch_first=True)
        weights = rng.random() < 0.5
        return Applies(lambda self, x: x + self.layer(x, x, x, need_weights=weights)[0], layer=layer)
    causal, p = rng.random() < 0.5, rng.choice([0.0, 0.0, 0.2])

    def function(self: Any, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (heads, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=p if self.training else 0.0)
        return y.transpose(1, 2).flatten(2)

    return Applies(function, project=nn.Linear(shape.width, 3 * shape.width))


@part("sequence", "rows")
def norm_of_rows(rng: random.Random, shape: Shape) -> nn.Module:
    n = shape.width
    made = [nn.LayerNorm(n), nn.LayerNorm(n, elementwise_affine=False), nn.RMSNorm(n)]
    made += [nn.BatchNorm1d(n), nn.BatchNorm1d(n, affine=False)] if shape.kind == "rows" else []
    return rng.choice(made)


@part("sequence")
def convolution_over_steps(rng: random.Random, shape: Shape) -> nn.Module:
    layer = nn.Conv1d(shape.width, rng.choice([8, 16]), 3, padding=1)
    return Applies(lambda self, x: self.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer)


@part("sequence", "rows")
def mixture(_rng: random.Random, shape: Shape) -> nn.Module:
    """Experts weighed by a gate; one takes what it gets in a view."""

    def function(self: Any, x: Tensor) -> Tensor:
        gate = torch.softmax(self.gate(x), -1)
        return gate[..., :1] * self.a(x) + gate[..., 1:] * torch.tanh(self.b(x))

    n = shape.width
    return Applies(function, gate=nn.Linear(n, 2), a=nn.Linear(n, 16), b=nn.Linear(n, 16))


@part("rows")
def table(rng: random.Random, shape: Shape) -> nn.Module:
    """Rows chosen from a table by the signs of features, and their sum."""
    bags = rng.random() < 0.5
    layer = (nn.EmbeddingBag(2, 16, mode=rng.choice(["sum", "mean", "max"])) if bags else
             nn.Embedding(2, 16, padding_idx=rng.choice([None, 0])))  # fmt: skip
    return Applies(
        lambda self, x: (y if (y := self.layer((x > 0).long())).dim() == 2 else y.sum(1)) + x.mean(), layer=layer
    )


_function(
    "sequence", "rows",
    sorted=lambda _, x: x.sort(-1)[0],
    running_sum=lambda _, x: torch.cumsum(x, -1) * 0.1,
    log_softmax=lambda _, x: torch.log_softmax(x, -1),
    gumbel=lambda _, x: F.gumbel_softmax(x, tau=0.7, dim=-1),
    hard_gumbel=lambda _, x: F.gumbel_softmax(x, hard=True, dim=-1) * x,
    gated=lambda _, x: F.glu(torch.cat((x, x.flip(-1)), -1), -1),
    products=lambda _, x: torch.einsum("...i,...j->...ij", x, x).mean(-1),
    first_steps_written=lambda _, x: _written(x, (slice(None), slice(0, 2)), 2.0),
    normalised=lambda _, x: F.normalize(x, dim=-1),
    largest=lambda _, x: x.topk(min(3, x.shape[-1]), -1)[0],
    every_other=lambda _, x: x[..., ::2],
    gathered=lambda _, x: x.gather(-1, x.argsort(-1)[..., : max(1, x.shape[-1] // 2)]),
    steps_first=lambda _, x: x.transpose(0, 1).contiguous().transpose(0, 1),
)  # fmt: skip
_function(
    noise=lambda _, x: x + 0.1 * torch.randn_like(x),
    uniform_noise=lambda _, x: x * torch.rand(x.shape, dtype=x.dtype),
    masked=lambda _, x: x * torch.bernoulli(torch.full_like(x, 0.8)),
    straight_through=lambda _, x: x + (torch.bernoulli(torch.sigmoid(x.detach())) - x).detach() * x,
    permuted=lambda _, x: x[torch.randperm(x.shape[0])],
    drawn=lambda _, x: x * torch.multinomial(torch.softmax(x.detach().float().flatten(1), -1), 1).to(x.dtype).view(
        (-1,) + (1,) * (x.dim() - 1)) * 1e-2,
    rrelu=lambda self, x: F.rrelu(x, training=self.training),
    rrelu_across=lambda self, x: F.rrelu(x.transpose(0, 1), training=self.training).transpose(0, 1),
    clipped=lambda _, x: x.clamp(-1, 1),
    scaled_in_place=lambda _, x: (x * 1).mul_(0.5).add_(0.1),
    exponential_in_place=lambda _, x: torch.tanh(x).exp_(),
    halves_joined=lambda _, x: torch.cat([y * (i + 1) for i, y in enumerate(x.chunk(2, 1))], 1),
    standardised=lambda _, x: (x - x.mean()) / (x.std() + 1e-3),
    where_positive=lambda _, x: torch.where(x > 0, x, 0.2 * x.sin()),
    half_detached=lambda _, x: x * torch.sigmoid(x.detach()),
    rolled=lambda _, x: x.roll(1, 0) + x,
    broadcast=lambda _, x: x + x.mean(0, keepdim=True).expand_as(x),
    converted=lambda _, x: torch.tanh(x.double()).to(x.dtype),
)  # fmt: skip


_add(
    activation=lambda rng, _shape: rng.choice(ACTIVATIONS)(rng.random() < 0.4),
    learned_scale=lambda _rng, shape: Applies(
        lambda self, x: x * self.scale + self.scale.square().mean(),
        scale=nn.Parameter(torch.rand((shape.width, 1, 1) if shape.kind == "image" else (shape.width,))),
    ),
    stateful=lambda rng, _shape: Applies(_remember, reads=rng.random() < 0.5, state={"n": 0, "last": None, "sums": []}),
    drifting=lambda _rng, _shape: Applies(_drift, level=torch.ones(()), weight=nn.Parameter(torch.zeros(()))),
    counting=lambda _rng, _shape: Applies(_count, state=0),
)
_add(
    "image",
    transposed_convolution=lambda rng, shape: nn.ConvTranspose2d(
        shape.width, max(2, shape.width // 2), 2, stride=rng.choice([1, 2])
    ),
    squeeze_and_excite=lambda _rng, shape: Applies(
        lambda self, x: x * torch.sigmoid(self.b(F.relu(self.a(x.mean((2, 3)))))).unflatten(1, (-1, 1, 1)),
        a=nn.Linear(shape.width, 4), b=nn.Linear(4, shape.width),
    ),
)  # fmt: skip
_add(
    "sequence",
    encoder_layer=lambda rng, shape: nn.TransformerEncoderLayer(
        shape.width, _heads(shape), 32, rng.choice([0.0, 0.1]), rng.choice(["relu", "gelu"]), batch_first=True,
        norm_first=rng.random() < 0.5,
    ),
)  # fmt: skip
_add(
    "sequence", "rows",
    linear=lambda rng, shape: nn.Linear(shape.width, rng.choice([shape.width, 16, 48]), bias=rng.random() < 0.7),
)  # fmt: skip
_add(
    "rows",
    bilinear=lambda _rng, shape: Applies(
        lambda self, x: self.layer(x, torch.tanh(x)), layer=nn.Bilinear(shape.width, shape.width, 8)
    ),
)


def _heads(shape: Shape) -> int:
    return 2 if shape.width % 2 == 0 else 1


def _drift(self: Any, x: Tensor) -> Tensor:
    """A buffer is read and then moved."""
    y = x * self.level + self.weight
    if self.training:
        self.level.mul_(0.9).add_(0.01 * x.detach().mean())
    return y


def _count(self: Any, x: Tensor) -> Tensor:
    self.state = self.state + 1
    return x * 1


def _written(x: Tensor, where: Any, factor: float) -> Tensor:
    x = x * 1
    x[where] *= factor
    return x


class _Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -0.5 * gradient


class _Swish(torch.autograd.Function):
    """x times its sigmoid, which the backward pass computes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 8).round() / 8

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient


FUNCTIONS: tuple[Any, ...] = (_Reversal, _Swish, _Rounded)
_function(
    reversal=lambda _, x: _Reversal.apply(x), swish_function=lambda _, x: _Swish.apply(x),
    rounded_function=lambda _, x: _Rounded.apply(x),
)  # fmt: skip


def _remember(self: Any, x: Tensor) -> Tensor:
    """Counts its calls, and keeps its last tensor and sums, in attributes; `reads` the last tensor or not."""
    self.state["n"] += 1
    last = self.state["last"]
    if self.reads and last is not None:
        x = x + 0.1 * last.mean()
    self.state["last"] = x.detach()
    return x


def _residual(self: Any, x: Tensor) -> Tensor:
    """What parts make of a tensor, and the tensor, where the two fit; written over the first or not."""
    y = self.parts(x * 1 if self.in_place else x)
    if y.shape != x.shape:
        return y
    return (y * 1).add_(x) if self.in_place else x + y


# From a tensor of one kind to one of another
BRIDGES: dict[tuple[str, str], Callable[[Tensor], Tensor]] = {
    ("image", "sequence"): lambda x: x.flatten(2).transpose(1, 2)[:, :8],
    ("image", "rows"): lambda x: x.mean((2, 3)),
    ("sequence", "rows"): lambda x: x[:, -1],
    ("rows", "sequence"): lambda x: x.unsqueeze(1) * torch.linspace(0.5, 1.5, 6, dtype=x.dtype)[:, None],
    ("sequence", "image"): lambda x: x.transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 4),
    ("rows", "image"): lambda x: x.unflatten(1, (-1, 1, 1)).expand(-1, -1, 5, 5),
}


class Net(nn.Module):
    """Parts one after the other, on one input or the sum of several, and what is returned of it all.

    Attributes:
        taken: positions of the parts whose results are returned besides.
        returns: how, of `RETURNS`.
    """

    def __init__(self, parts: list[nn.Module], taken: list[int], returns: str, joins: str):
        super().__init__()
        self.parts, self.taken, self.returns, self.joins = nn.ModuleList(parts), taken, returns, joins
        self.last: Any = None  # an autograd Function that makes the result
        self.gain, self.unused = nn.Parameter(torch.ones(())), nn.Linear(3, 3)

    def forward(
        self, x: Tensor, *others: Tensor, scale: float | Tensor = 1.0, more: Any = None, mask: Any = None
    ) -> Any:
        given = x
        for other in others:
            x = x + other if self.joins == "add" else x * torch.tanh(other)
        x, taken = x * (scale * self.gain), []
        if mask is not None and not bool(mask.all()):  # as libraries drop a mask that hides nothing
            x = x * mask
        if more is not None:
            x = x + more["shift"][0]
        for i, one in enumerate(self.parts):
            x = one(x)
            if i in self.taken:
                taken.append(x)
        if self.last is not None:
            x = self.last.apply(x)
        return RETURNS[self.returns](self, given, x, taken)


RETURNS: dict[str, Callable[[Net, Tensor, Tensor, list[Tensor]], Any]] = {
    "last": lambda _net, _given, x, _taken: x,
    "loss": lambda _net, _given, x, taken: x.float().square().mean() + sum(y.float().mean() for y in taken),
    "tuple": lambda _net, _given, x, taken: (x, *taken),
    "dict": lambda _net, _given, x, taken: {
        "last": x, "taken": taken, "none": None, "n": len(taken), "best": x.argmax(-1), "fixed": x.detach() * 1
    },
    "views": lambda _net, _given, x, taken: (x, x[:1], [y.flatten() for y in taken if y is not x]),
    "mixed": lambda net, given, x, taken: {
        "mean": x.float().square().mean(), "last": x, "given": given, "weight": next(net.parameters()),
        "again": (x, taken),
    },
}  # fmt: skip
OFTEN = ("last", "last", "tuple", "tuple", "dict", "views", "mixed", "loss", "loss")


def make(seed: int) -> Case:
    """The case of a seed: the first one drawn that trains in plain PyTorch."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    while True:
        case = _draw(rng)
        if {"autocast", "bilinear"} <= {*case.parts}:  # whose kernel looks for autocast itself, as the guide says
            continue
        # e.g. an in-place operation on what the backward pass needs
        with contextlib.suppress(*UNTRAINABLE):
            tried = copy.deepcopy(case)
            with case.context():
                outputs = tried.model(*tried.args, **tried.kwargs)
            if "views" in case.parts and not all(x.is_contiguous() for x in differentiable(outputs)):
                continue  # the gradient of their base may arrive in another layout, as the guide says
            _step(tried.model, tried, seed)
            return _trained_in(case, seed, outputs)


def _trained_in(case: Case, seed: int, outputs: Any) -> Case:
    """The case in the loop of its seed, or in the usual one if plain PyTorch does not take that."""
    looped = replace(case, loop=loop_of(seed, outputs))
    with contextlib.suppress(*UNTRAINABLE):
        tried = copy.deepcopy(looped)
        attach(tried.model, tried.loop.hooks)
        for step in range(STEPS):
            _step(tried.model, tried, seed + step)
        return looped
    return case


def _draw(rng: random.Random) -> Case:
    dtype = rng.choice([torch.float32] * 12 + [torch.float64, torch.bfloat16])
    kind = rng.choice(["image", "image", "sequence", "sequence", "rows"])
    first = _first(rng, kind, dtype)
    builder = _Builder(rng, first, dtype)
    parts = builder.parts(rng.randint(4, 12))
    taken = sorted(rng.sample(range(len(parts)), rng.choice([0, 1, 1, 2])))
    net = Net(parts, taken, rng.choice(OFTEN), rng.choice(["add", "gate"]))
    model = net.to(dtype)
    more = random.Random(f"more {rng.random()}")
    net.last = more.choice(FUNCTIONS) if more.random() < 0.08 else None
    _freeze(rng, model)
    model.train(rng.random() < 0.88)
    args, kwargs = _arguments(rng, first, dtype)
    if more.random() < 0.06:
        kwargs["mask"] = torch.ones(first.shape[:1] + (1,) * (first.dim() - 1), dtype=torch.bool)
    if kind == "image" and rng.random() < 0.3:
        model = model.to(memory_format=torch.channels_last)
        args = tuple(_laid_out(x, torch.channels_last) for x in args)
    autocast = dtype is torch.float32 and rng.random() < 0.15
    context = torch_helpers.autocast if autocast else contextlib.nullcontext
    said = (*(["autocast"] if autocast else []), str(dtype).removeprefix("torch."), net.returns,
            *(["eval"] if not model.training else []), *(["ones"] if "mask" in kwargs else []), *builder.names,
            *([net.last.__name__] if net.last else []))  # fmt: skip
    return Case(model, args, kwargs, context, said, Loop("squares", squares, is_given=True))


@dataclass
class _Builder:
    """Chooses parts one after the other; each is run once, which tells the shape that the next one gets."""

    rng: random.Random
    x: Tensor
    dtype: torch.dtype
    kind: str = ""
    names: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind = {4: "image", 3: "sequence", 2: "rows"}[self.x.dim()]

    def parts(self, n: int) -> list[nn.Module]:
        made: list[nn.Module] = []
        while len(made) < n:
            luck = self.rng.random()
            if luck < 0.1 and made:  # shared with an earlier place, if it fits here
                one, name = self.rng.choice(made), "shared"
            elif luck < 0.2:
                inner = [self._choose()[0] for _ in range(self.rng.randint(1, 3))]
                in_place = self.rng.random() < 0.3
                one, name = Applies(_residual, parts=nn.Sequential(*inner), in_place=in_place), "residual"
            elif luck < 0.28:
                target = self.rng.choice([k for k in PARTS if k != self.kind])
                bridge = BRIDGES[self.kind, target]
                one, name = Applies(lambda _, x, bridge=bridge: bridge(x)), f"to_{target}"
            else:
                one, name = self._choose()
            if self._take(one):
                made.append(one)
                self.names.append(name)
        return made

    def _choose(self) -> tuple[nn.Module, str]:
        name = self.rng.choice(sorted(PARTS[self.kind]))
        return PARTS[self.kind][name](self.rng, Shape(self.kind, tuple(self.x.shape))), name

    def _take(self, one: nn.Module) -> bool:
        """Whether the part runs here, and leaves something of a moderate size."""
        with torch.no_grad():
            try:
                y = copy.deepcopy(one).to(self.dtype)(self.x)
            except (RuntimeError, ValueError, IndexError, TypeError, AssertionError):
                return False
        kind = {4: "image", 3: "sequence", 2: "rows"}.get(y.dim())
        if kind is None or y.numel() > 60_000 or 0 in y.shape or not bool(y.isfinite().all()):
            return False
        if y.numel() < 200 or y.shape[0] < 2:
            return False
        self.x, self.kind = y, kind
        return True


def _first(rng: random.Random, kind: str, dtype: torch.dtype) -> Tensor:
    if kind == "image":
        sizes = (rng.randint(2, 5), rng.choice([3, 4, 8, 12]), rng.randint(7, 20), rng.randint(7, 20))
    elif kind == "sequence":
        sizes = (rng.randint(2, 16), rng.randint(4, 8), rng.choice([8, 16, 24]))
    else:
        sizes = (rng.randint(16, 200), rng.choice([8, 12, 32]))
    return torch.randn(sizes, dtype=dtype)


def _arguments(rng: random.Random, first: Tensor, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    tensors = [torch.randn(first.shape, dtype=dtype) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    if rng.random() < 0.2:
        tensors[0] = tensors[0].transpose(0, 1).contiguous().transpose(0, 1)
    for x in tensors:
        x.requires_grad_(rng.random() < 0.25)
    kwargs: dict[str, Any] = {}
    if rng.random() < 0.2:
        kwargs["scale"] = rng.choice([0.5, torch.tensor(0.5, dtype=dtype)])
    if rng.random() < 0.15:
        kwargs["more"] = {"shift": [torch.randn(first.shape[-1], dtype=dtype)], "name": "shift"}
    return tuple(tensors), kwargs


def _laid_out(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    return x.detach().to(memory_format=memory_format).requires_grad_(x.requires_grad)


def _freeze(rng: random.Random, model: nn.Module) -> None:
    """Some parameters are not trained; the gain, which is used, always is."""
    if rng.random() < 0.3:
        for name, p in model.named_parameters():
            p.requires_grad_(name == "gain" or rng.random() < 0.6)
