"""One step on every GPU: which hold it, with how much recomputation, how long it takes and what it costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from remat.cost import Gpu, gpu_names, link_of, load_gpu
from remat.errors import InvalidInput, plain, shown, unknown_name
from remat.graph import Graph
from remat.link import Link, is_auto, parse_link
from remat.problem import SolveOptions
from remat.simulator import simulate
from remat.torch.explaining.factory import StepFactory
from remat.torch.explaining.gpu_kernels import kernel_family
from remat.torch.explaining.largest import KnownPlans
from remat.torch.explaining.training import Training
from remat.torch.step.aot import no_collection
from remat.units import format_size

PRICE = re.compile(r"(\d+\.?\d*|\.\d+)/h")


@dataclass(frozen=True, slots=True)
class OnGpu:
    """A step on one GPU.

    Attributes:
        plain_peak_bytes: of PyTorch's own step; None if what is there throughout is more than the memory already.
        least_bytes: the smallest budget known to suffice; or, without a plain peak, what is there throughout.
        overhead: of the cheapest plan found within the memory, 0 if the plain step fits; None without a plan.
        step_s: seconds of forward and backward pass by the roofline, under that plan.
        price: for an hour; None if none was given.
        copies: whether that plan copies to the host.
    """

    gpu: Gpu
    plain_peak_bytes: int | None
    least_bytes: int
    overhead: float | None = None
    step_s: float | None = None
    price: float | None = None
    copies: bool = False

    @property
    def step_price(self) -> float | None:
        """Of one step."""
        return None if self.price is None or self.step_s is None else self.price * self.step_s / 3600


@dataclass(frozen=True, slots=True)
class Comparison:
    """A step on several GPUs, those with less memory first."""

    name: str
    trained: str
    gpus: tuple[OnGpu, ...]

    @property
    def smallest(self) -> OnGpu | None:
        """The first that has a plan."""
        return next((each for each in self.gpus if each.overhead is not None), None)

    @property
    def smallest_plain(self) -> OnGpu | None:
        """The first that needs no recomputation."""
        return next((each for each in self.gpus if each.overhead == 0), None)

    @property
    def cheapest(self) -> OnGpu | None:
        """Where a step costs least, of those with a price."""
        priced = [(each.step_price, i) for i, each in enumerate(self.gpus) if each.step_price is not None]
        return self.gpus[min(priced)[1]] if priced else None

    def __str__(self) -> str:
        return "\n".join(_lines(self))


@no_collection()  # captured steps are a million objects each
def compare(
    factory: str | Callable[..., Any], gpus: Sequence[str] = (), *, prices: Mapping[str, str | float] | None = None,
    optimizer: str | int | None = "adamw", batch_size: int | None = None, shard: int | None = None,
    precision: str | None = None, lora: int | None = None, link: Link | str | None = None, time_limit_s: float = 2.0,
    threads: int = 2, **options: Any,
) -> Comparison:  # fmt: skip
    """What `explain` says of one step, for many GPUs at once: each with its own kernels, memory and speed.

    Args:
        gpus: their names; by default all that remat knows.
        prices: [GPU] for an hour, a number or e.g. ``2.5/h``.
        link: with it, plans copy to the host too; ``auto`` is each GPU's own, and GPUs without one recompute only.

    Raises: as `explain`.
    """
    SolveOptions(time_limit_s=time_limit_s, threads=threads).checked()
    if isinstance(gpus, str) or not isinstance(gpus, Sequence):
        raise InvalidInput(f"gpus must be a list of names, e.g. ['h100', 'l40s'], not {shown(gpus)}")
    if not is_auto(link):
        link = parse_link(link)
    devices = [load_gpu(name) for name in gpus or [name for name in gpu_names() if name != "cpu"]]
    per_hour = _prices(prices, [device.name for device in devices])
    training = Training(precision, lora)
    options |= {} if batch_size is None else {"batch_size": batch_size}
    devices.sort(key=lambda device: (kernel_family(device), device.memory_bytes))
    families = [[*those] for _, those in groupby(devices, kernel_family)]
    families.sort(key=lambda those: -those[-1].memory_bytes)  # the first is captured even if no step fits
    made = StepFactory(factory, options, families[0][0], optimizer, shard, training)
    found, there, trained = list[OnGpu](), 0, ""
    for those in families:
        if there > those[-1].memory_bytes:
            found += [OnGpu(gpu, None, there, price=per_hour.get(gpu.name)) for gpu in those]
            continue
        made.use(those[0])
        step, known, model = made.step({})
        trained = training.describe(model)
        holding = {gpu.name: made.holding(model, gpu) for gpu in those}
        graphs = {gpu.name: holding[gpu.name].costed(holding[gpu.name].held(step.graph)) for gpu in those}
        first = graphs[those[-1].name]
        there = sum(
            holding[those[0].name].bytes_by_name(first)[name] for name in ("parameters", "optimizer state", "gradients")
        )
        plans = KnownPlans(first, time_limit_s, threads)
        least = plans.least(first)
        for gpu in those:
            graph, peak = graphs[gpu.name], holding[gpu.name].framework_peak(graphs[gpu.name].fixed_bytes, known.needs)
            need = min(peak, least + graph.fixed_bytes - first.fixed_bytes)
            over = None if link is None or (is_auto(link) and not gpu.link) else link_of(gpu, link)
            with_copies = plans if over is None else plans.over(over)
            if over is not None:
                need = min(need, with_copies.least_copying(graph))
            found.append(_on_gpu(gpu, graph, peak, need, with_copies, per_hour.get(gpu.name)))
    found.sort(key=lambda each: (each.gpu.memory_bytes, each.gpu.name))
    return Comparison(", ".join(filter(None, (made.name, made.describe_sizes()))), trained, tuple(found))


def _on_gpu(gpu: Gpu, graph: Graph, peak: int, least: int, plans: KnownPlans, price: float | None) -> OnGpu:
    step_s, overhead, copies = graph.total_cost / 1e9, 0.0, False
    if peak > gpu.memory_bytes:
        plan = plans.cheapest(graph, gpu.memory_bytes) if least <= gpu.memory_bytes else None
        if plan is None:
            return OnGpu(gpu, peak, least, price=price)
        cost = simulate(graph, plan).cost
        step_s, overhead, copies = cost / 1e9, cost / graph.total_cost - 1, plan.has_copies
    return OnGpu(gpu, peak, least, overhead, step_s, price, copies)


def _prices(prices: Mapping[str, str | float] | None, names: Sequence[str]) -> dict[str, float]:
    """[GPU] for an hour."""
    if not isinstance(prices, (Mapping, type(None))):
        raise InvalidInput(f"prices must be a dict, e.g. {{'h100': 2.5}}, not {shown(prices)}")
    per_hour = {name: _per_hour(name, price) for name, price in (prices or {}).items()}
    for name in per_hour.keys() - set(names):
        raise unknown_name("gpu of a price", name, names)
    return per_hour


def _per_hour(name: str, price: str | float) -> float:
    if isinstance(price, int | float) and not isinstance(price, bool):
        number = float(price)
    else:
        match = PRICE.fullmatch(str(price))
        if match is None:
            raise InvalidInput(f"the price '{plain(price)}' of {plain(name)} has no unit: write {plain(name)}=2.5/h")
        number = float(match[1])
    if not 0 <= number < float("inf"):
        raise InvalidInput(f"the price of {plain(name)} must be a positive number, not {number}")
    return number


def _lines(found: Comparison) -> Iterator[str]:
    yield f"{found.name}: a step on {len(found.gpus)} GPUs"
    yield f"  trained  {found.trained}"
    has_price = any(each.price is not None for each in found.gpus)
    yield f"  {'GPU':<10} {'memory':>9} {'plain peak':>11}  {'fits':<28} {'step':>9}" + (
        f" {'an hour':>8} {'1,000 steps':>12}" if has_price else ""
    )
    for each in found.gpus:
        peak = "" if each.plain_peak_bytes is None else _short(each.plain_peak_bytes)
        line = f"  {each.gpu.name:<10} {_short(each.gpu.memory_bytes):>9} {peak:>11}  {_fits(each):<28} "
        line += f"{'' if each.step_s is None else f'{each.step_s:.3g} s':>9}"
        if has_price:
            line += f" {'' if each.price is None else f'{each.price:.2f}':>8}"
            line += f" {'' if each.step_price is None else f'{1000 * each.step_price:.3f}':>12}"
        yield line.rstrip()
    for what, one in (
        ("smallest without recomputation", found.smallest_plain), ("smallest that fits", found.smallest),
        ("cheapest step", found.cheapest),
    ):  # fmt: skip
        if one is not None:
            yield f"  {what}: {one.gpu.name}"
    if found.smallest is None:
        yield "  no GPU is known to hold it: divide it over ranks, train adapters, or shorten the sequences"
    yield "  a step is forward and backward pass, by the roofline of the GPU"


def _fits(each: OnGpu) -> str:
    if each.overhead is None:
        return f"no, {'at least' if each.plain_peak_bytes is None else 'needs'} {_short(each.least_bytes)}"
    if each.copies:
        return f"copying, {each.overhead:.1%} longer"
    return "yes" if each.overhead == 0 else f"recomputing, {each.overhead:.1%} longer"


def _short(n_bytes: int) -> str:
    return format_size(n_bytes).partition(" (")[0]
