"""Plans under Inductor beside PyTorch's knob for compiled steps, ``activation_memory_budget``, at sizes for a CPU."""

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch._functorch import config as functorch_config
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator
from torch.utils._python_dispatch import _disable_current_modes

from experiments.compiled import SOLVERS
from experiments.steps.measure_step import Beside, planned, promise_of, step_for_a_cpu
from remat.cost.timing import measure as measure_call
from remat.errors import InvalidInput, headline
from remat.torch.planning.capturing import call_of_models
from remat.torch.planning.planner import there_before

OPTIONS: dict[str, dict[str, Any]] = {"llama": {"n_groups": 2}}  # grouped heads
SHARES = tuple(i / 10 for i in range(9, -1, -1))
BUDGETS = 10  # of remat's evenly spaced ones, beside the knob's peaks
NEAR = 0.03  # of the plain peak: an even budget that is nearer to a peak of the knob is left out
SAME = 0.002  # peaks of the knob that differ by less count as one


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
        self.__dict__["call"] = functools.partial(torch.compile(call_of_models()), inner)

    def forward(self, *args: Any) -> Tensor:
        return self.__dict__["call"](*args)


def compared(model: str, rounds: int, time_limit_s: float, threads: int) -> list[dict[str, Any]]:
    """Rows of the compiled plain step, the eager one, points of the knob, and plans within their peaks."""
    torch.set_num_threads(threads)
    module, args = step_for_a_cpu(model, OPTIONS.get(model, {}))
    plain = _Compiled(module)
    beside = Beside(plain, args)
    beside.add(plain, {"variant": "plain"})
    beside.add(module, {"variant": "eager"})
    failed = [row for solver in SOLVERS for share in SHARES for row in _knob(beside, module, share, solver)]
    tensors = [*module.parameters(), *module.buffers(), *args]  # a budget counts them beside a step's peak
    held = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())
    for peak in _budgets(beside.rows):
        began = time.perf_counter()
        try:
            made = planned(module, args, held + peak, backend="inductor", time_limit_s=time_limit_s)
        except InvalidInput as error:
            failed.append({"variant": "remat", "message": str(error)})
            break
        row = {"variant": "remat", "plan_s": round(time.perf_counter() - began, 1), **promise_of(made.plan)}
        before = there_before(made.plan)
        row |= {"budget_bytes": peak, "predicted_bytes": made.predicted_peak_bytes - before}
        beside.add(made, row)
    return [{"held_bytes": held, **row} for row in (*beside.timed(rounds), *failed)]


def _knob(beside: Beside, module: nn.Module, share: float, solver: str) -> Iterator[dict[str, Any]]:
    """Add plain ``torch.compile`` under PyTorch's knob; gives a row with a message if it fails."""
    settings: dict[str, Any] = {
        "activation_memory_budget": share,
        "activation_memory_budget_solver": solver,
        "activation_memory_budget_runtime_estimator": _Timed(),
        "enable_autograd_cache": False,
    }
    with functorch_config.patch(settings):
        try:
            beside.add(_Compiled(module), {"variant": solver, "share": share})
        except Exception as error:
            yield {"variant": solver, "share": share, "message": f"{type(error).__name__}: {headline(error)}"}


def _budgets(rows: Sequence[dict[str, Any]]) -> list[int]:
    """The knob's peaks below the plain one, which is the first, and evenly spaced ones, in falling order."""
    top, theirs = rows[0]["measured_bytes"], list[int]()
    for peak in sorted((row["measured_bytes"] for row in rows if row["variant"] in SOLVERS), reverse=True):
        if peak < (1 - SAME) * (theirs[-1] if theirs else top):
            theirs.append(peak)
    even = [round(top * (1 - (i + 1) * 0.08)) for i in range(BUDGETS)]
    apart = [peak for peak in even if all(abs(peak - other) > NEAR * top for other in theirs)]
    return sorted({*theirs, *apart}, reverse=True)


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


def dropout(threads: int) -> list[dict[str, Any]]:
    """Whether the backward pass sees the numbers that the forward pass drew.

    The loss is linear in the last weight, so that it equals the product of weight and gradient; it does not if the
    backward pass drops other elements.
    """
    torch.set_num_threads(threads)
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
        made = planned(plain, (x,), share, backend="inductor", cost="roofline", time_limit_s=5)
        rows.append({"variant": "remat", "share": share, "error": wrong(made), "recomputed": len(made.plan.recomputed)})
    return rows
