"""``make compiled``: plans under Inductor beside PyTorch's own knob for compiled steps, ``activation_memory_budget``.

Small networks at sizes for a CPU. The knob is driven with both of its solvers (dp, ilp) and its profiling estimator.
remat gets the peak of each of the knob's points as a budget, and smaller budgets. Rounds are paired: in each round
every variant makes one step, and times are divided by that of plain ``torch.compile`` in the same round.
A finished model is not measured again: its file in the folder is kept.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch.utils._python_dispatch import _disable_current_modes

import remat.torch as rt
from experiments.arguments import Parser, count, names_of, run, seconds
from experiments.documents import ROOT
from experiments.provenance import of_torch, torch_and_cpu
from experiments.steps.torch_steps import paired_seconds, step_for_a_cpu
from experiments.store import write_json
from remat.cost.timing import measure as measure_call
from remat.errors import InvalidInput, headline
from remat.files import read_json
from remat.torch import module
from remat.torch.measure import difference_of_steps, peak_of_step
from remat.torch.planner import there_before

DROPOUT = "dropout.json"
RESULTS = ROOT / "results" / "compiled"
MODELS = ("gpt2", "llama", "vit", "resnet50", "unet")
OPTIONS: dict[str, dict[str, Any]] = {"llama": {"n_groups": 2}}  # grouped heads
SHARES = tuple(i / 10 for i in range(9, -1, -1))
SOLVERS = ("dp", "ilp")
BUDGETS = 10  # of remat's evenly spaced ones, beside the knob's peaks
ROUNDS = 21
NEAR = 0.03  # of the plain peak: an even budget that is nearer to a peak of the knob is left out
SAME = 0.002  # peaks of the knob that differ by less count as one


@dataclass(slots=True)
class Variant:
    """A compiled step.

    Attributes:
        row: what is known of it.
        model: to be called.
    """

    row: dict[str, Any]
    model: nn.Module


class _Timed(CustomRuntimeEstimator):
    """The knob's profiling estimator on a CPU, where PyTorch's own does not run."""

    seconds: ClassVar[dict[str, float]] = {}

    def __call__(self, node: fx.Node) -> float:
        given = [x.meta.get("val") for x in node.all_input_nodes]
        key = f"{node.target} {[(tuple(x.shape), x.stride()) for x in given if isinstance(x, Tensor)]} {node.args}"
        if key not in self.seconds:
            with _disable_current_modes():
                self.seconds[key] = _seconds_of(node)
        return 1000 * self.seconds[key]

    def uuid(self) -> None:
        """None, so that nothing is cached."""


def _seconds_of(node: fx.Node) -> float:
    def real(x: fx.Node) -> Any:
        value = x.meta.get("val")
        if not isinstance(value, Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        return made.uniform_() if value.is_floating_point() else made.zero_()

    args, kwargs = fx.map_arg((node.args, node.kwargs), real)
    return measure_call(lambda: node.target(*args, **kwargs)).median_ns / 1e9  # pyright: ignore[reportCallIssue]


class _Compiled(nn.Module):
    """A module under `torch.compile`, with code of its own, so that no variant finds the code of another."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.__dict__["call"] = torch.compile(module.call_of(inner))

    def forward(self, *args: Any) -> Tensor:
        return self.__dict__["call"](*args)


class Measured:
    """A network, and its variants at the sizes of a CPU."""

    def __init__(self, name: str, threads: int):
        torch._dynamo.reset()
        gc.collect()
        torch.set_num_threads(threads)
        self.module, self.args = step_for_a_cpu(name, OPTIONS.get(name, {}))
        self.variants: list[Variant] = []

    def add(self, row: dict[str, Any], model: nn.Module) -> Variant:
        """Compile a variant, and measure its peak."""
        began = time.perf_counter()
        peak = peak_of_step(model, self.args, {}, "cpu")
        row |= {"peak_bytes": peak, "first_step_s": round(time.perf_counter() - began, 1)}
        self.variants.append(Variant(row, model))
        row["difference"] = difference_of_steps(self.variants[0].model, model, self.args, {}, "cpu")
        print(json.dumps(row), flush=True)
        return self.variants[-1]


def knob(measured: Measured, share: float, solver: str) -> None:
    """Plain ``torch.compile`` under PyTorch's knob."""
    settings: dict[str, Any] = {
        "activation_memory_budget": share,
        "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": _Timed(),
        "enable_autograd_cache": False,
    }
    with functorch_config.patch(settings):
        try:
            measured.add({"variant": solver, "share": share}, _Compiled(measured.module))
        except Exception as error:
            text = f"{type(error).__name__}: {headline(error)}"
            print(json.dumps({"variant": solver, "share": share, "failed": text}), flush=True)


def ours(measured: Measured, peak_bytes: int, held_bytes: int, time_limit_s: float) -> bool:
    """remat within a peak; False if it finds no plan."""
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = rt.rematerialize(
                measured.module, measured.args, held_bytes + peak_bytes, backend="inductor", time_limit_s=time_limit_s
            )
    except InvalidInput as error:
        print(f"  {error}", flush=True)
        return False
    row = {
        "variant": "remat", "allowed_bytes": peak_bytes, "plan_s": round(time.perf_counter() - began, 1),
        "predicted_bytes": planned.predicted_peak_bytes - there_before(planned.plan),
        "overhead": planned.overhead, "recomputed": len(planned.plan.recomputed),
    }  # fmt: skip
    measured.add(row, planned)
    return True


def held_before(measured: Measured) -> int:
    """Bytes of parameters, buffers and arguments, which a budget counts beside a step's peak."""
    tensors = [*measured.module.parameters(), *measured.module.buffers(), *measured.args]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


def measure(name: str, threads: int, rounds: int, time_limit_s: float, shares: Sequence[float]) -> dict[str, Any]:
    """The rows of a network."""
    measured = Measured(name, threads)
    plain = measured.add({"variant": "plain"}, _Compiled(measured.module))
    measured.add({"variant": "eager"}, measured.module)
    for solver in SOLVERS:
        for share in shares:
            knob(measured, share, solver)
    held, top = held_before(measured), plain.row["peak_bytes"]
    for peak in _budgets(measured, top):
        if not ours(measured, peak, held, time_limit_s):
            break
    times = paired_seconds([variant.model for variant in measured.variants], measured.args, rounds)
    for variant, own in zip(measured.variants, times, strict=True):
        ratios = [mine / theirs for mine, theirs in zip(own, times[0], strict=True)]  # the first one is plain
        variant.row |= {"seconds": statistics.median(own), "ratios": [round(x, 4) for x in ratios]}
    return {"model": name, "held_bytes": held, "rounds": rounds, "rows": [each.row for each in measured.variants]}


def _budgets(measured: Measured, top: int) -> Iterator[int]:
    """The knob's peaks below the plain one, and evenly spaced ones, in falling order."""
    theirs = list[int]()
    for peak in sorted((v.row["peak_bytes"] for v in measured.variants if v.row["variant"] in SOLVERS), reverse=True):
        if peak < (1 - SAME) * (theirs[-1] if theirs else top):
            theirs.append(peak)
    even = [round(top * (1 - (i + 1) * 0.08)) for i in range(BUDGETS)]
    apart = [peak for peak in even if all(abs(peak - other) > NEAR * top for other in theirs)]
    yield from sorted({*theirs, *apart}, reverse=True)


class Dropped(nn.Module):
    """Layers with dropout before a last linear one, without bias; the loss is the sum of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        widths = (64, 256, 64, 256, 64)
        layers = ((nn.Linear(a, b), nn.Tanh(), nn.Dropout(0.5)) for a, b in itertools.pairwise(widths))
        self.layers = nn.Sequential(*itertools.chain.from_iterable(layers))
        self.last = nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x)).sum()


def dropout() -> list[dict[str, Any]]:
    """Whether the backward pass sees the numbers that the forward pass drew.

    The loss is linear in the last weight, so that it equals the product of weight and gradient; it does not if the
    backward pass drops other elements.
    """
    torch.manual_seed(0)
    plain, x = Dropped(), torch.randn(512, 64)

    def wrong(model: nn.Module) -> float:
        plain.zero_grad()
        loss = model(x)
        loss.backward()
        product = (plain.last.weight.grad * plain.last.weight).sum()  # pyright: ignore[reportOptionalOperand]
        return abs(float(loss - product) / float(loss))

    rows = [{"variant": "eager", "error": wrong(plain)}, {"variant": "plain", "error": wrong(_Compiled(plain))}]
    for share in (0.8, 0.5, 0.2):
        with functorch_config.patch(activation_memory_budget=share, enable_autograd_cache=False):
            rows.append({"variant": "knob", "share": share, "error": wrong(_Compiled(plain))})
    for share in (0.95, 0.9, 0.8):
        planned = rt.rematerialize(plain, (x,), share, backend="inductor", cost="roofline", time_limit_s=5)
        repeated = len(planned.plan.recomputed)
        rows.append({"variant": "remat", "share": share, "error": wrong(planned), "recomputed": repeated})
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Write a file for each model, and print its rows."""
    parser = Parser(prog="python -m experiments.compiled", description=__doc__,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--models", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    parser.add_argument("--time-limit", type=seconds, default=10.0, help="seconds of search for each budget")
    parser.add_argument("--rounds", type=count, default=ROUNDS)
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--again", action="store_true", help="measure finished models too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    names = names_of("model", chosen.models, MODELS)
    where = of_torch() | {"threads": chosen.threads}
    made = torch_and_cpu() | {"threads": chosen.threads, "rounds": chosen.rounds, "time_limit_s": chosen.time_limit}
    write_json(Path(chosen.out) / DROPOUT, where | {"rows": dropout()})
    for name in names:
        path = Path(chosen.out) / f"{name}.json"
        known = read_json(path) if path.exists() else {}
        if known.items() >= made.items() and not chosen.again:
            print(f"{name}: measured before, in {path}")
            continue
        rows = measure(name, chosen.threads, chosen.rounds, chosen.time_limit, SHARES)
        write_json(path, rows | where | {"time_limit_s": chosen.time_limit})


if __name__ == "__main__":
    run(main)
