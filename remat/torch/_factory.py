"""Steps of a model that a factory makes, at any batch size and length, as a GPU would run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from remat.cost import Gpu
from remat.errors import InvalidInput, RematError
from remat.frontends.spec import ModelSpec, first_line, load_target, place_in_target
from remat.graph import Graph
from remat.torch import build
from remat.torch._gpu_kernels import kernels_of, with_workspaces
from remat.torch._sizes import SizedStep
from remat.torch.graphs import DescribedGraph, described_graph

LENGTHS = ("length", "seq_len", "sequence_length", "seq_length")  # names that factories give the length of a sequence


class StepFactory:
    """Makes steps of a model, and keeps their graphs.

    Attributes:
        name: of the factory.
        beside: bytes that are there throughout beside a model, its buffers and inputs; a part of its graphs. It is
            asked before the step is captured, so that what it refuses costs no time.
    """

    def __init__(
        self, factory: str | Callable[..., Any], options: dict[str, Any], gpu: Gpu,
        beside: Callable[[nn.Module], int] = lambda _: 0,
    ):  # fmt: skip
        self.target = factory if isinstance(factory, str) else ""
        self.make: Callable[..., Any] = load_target(factory) if isinstance(factory, str) else factory
        self.options, self.gpu, self.beside = options, gpu, beside
        self.name = self.target.rpartition(":")[2] or getattr(factory, "__name__", "model")
        self.graphs: dict[tuple[tuple[str, int], ...], Graph] = {}  # [sizes other than those asked for]
        self.repeats: bool | None = None  # whether blocks may be repeated; None: not known yet

    def step(self, sizes: Mapping[str, int]) -> tuple[DescribedGraph, nn.Module]:
        """(the step's graph at these sizes, without costs, its model).

        Raises:
            InvalidInput: the factory cannot be used, or its step cannot be captured.
        """
        options: dict[str, Any] = {**self.options, **sizes}
        input_size = tuple(options.pop("input_size", ()))
        batch_size = options.get("batch_size", self._default("batch_size") or 1)
        if "batch_size" not in inspect.signature(self.make).parameters:
            options.pop("batch_size", None)
        spec = ModelSpec(self.name, "torch", self.target or self.name, batch_size, input_size, options=options)
        try:
            model, args, loss_fn = build.build(spec, self.make)
        except RematError:
            raise
        except Exception as error:  # the user's factory can raise anything
            place = place_in_target(error, self.target)
            raise InvalidInput(f"{spec.target} raised {first_line(error)}{place}") from error
        beside_bytes = self.beside(model)
        with kernels_of(self.gpu):
            made = described_graph(model, args, name=self.name, loss_fn=loss_fn, repeats=self.repeats)
        self.repeats = made.is_repeated
        graph = with_workspaces(made.graph)
        made = replace(made, graph=replace(graph, fixed_bytes=graph.fixed_bytes + beside_bytes))
        self.graphs.setdefault(self._key(sizes), made.graph)
        return made, model

    def graph(self, sizes: Mapping[str, int]) -> Graph:
        """The step's graph at these sizes, without costs."""
        key = self._key(sizes)
        return self.graphs[key] if key in self.graphs else self.step(sizes)[0].graph

    def growing(self) -> Iterator[tuple[str, str, int]]:
        """(what grows, its parameter, degree of bytes and work in it)."""
        if self._default("batch_size") or "batch_size" in self.options:
            yield "batch", "batch_size", 1
        name = next((n for n in LENGTHS if self._default(n) or n in self.options), None)
        if name is not None:
            yield "length", name, 2

    def sized(self, parameter: str, degree: int) -> SizedStep:
        """The step at any size of a parameter.

        Raises:
            InvalidInput: its operations differ between sizes, or it cannot be captured at one.
        """
        base = self.options.get(parameter) or self._default(parameter)
        assert base is not None
        base = max(2, base)  # size 1 makes other operations
        sizes = [
            base + max(1, base // 2) * i for i in range(degree + 1)
        ]  # a table of positions grows from its length on
        return SizedStep.of(lambda n: self.graph({parameter: n}), sizes)

    def _key(self, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, n) for name, n in sizes.items() if n != (self.options.get(name) or self._default(name)))

    def _default(self, parameter: str) -> int | None:
        known = inspect.signature(self.make).parameters.get(parameter)
        return known.default if known is not None and isinstance(known.default, int) else None
