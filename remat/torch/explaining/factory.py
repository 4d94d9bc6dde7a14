"""Steps of a model that a factory makes, at any batch size and length, as a GPU would run them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from remat.cost import Gpu
from remat.errors import InvalidInput, RematError, first_line, shown
from remat.frontends.spec import ModelSpec, load_target, place_in_target
from remat.graph import Graph
from remat.torch.explaining.gpu_kernels import kernels_of, with_workspaces, workspace_of_call
from remat.torch.explaining.holding import Holding
from remat.torch.explaining.sizes import StepAtSize, StepAtSizes, are_alike
from remat.torch.explaining.training import Training
from remat.torch.frontend import build
from remat.torch.frontend.graphs import DescribedGraph, described_graph
from remat.torch.frontend.repeated import Copies, Repeated
from remat.torch.internals.dynamo import TraceSettings
from remat.torch.measuring.plain import FollowedStep, has_recurrent_layer, plain_step
from remat.torch.resident.optimizer import state_bytes
from remat.torch.resident.shard import WHOLE, Sharding
from remat.torch.step.blocks import blocks_in_rows

LENGTHS = ("length", "seq_len", "sequence_length", "seq_length")  # names that factories give the length of a sequence
GRAIN = 32  # tokens: some kernels of attention hold numbers for so many rows at once


class StepFactory:
    """Makes steps of a model, and keeps what is known of them.

    Attributes:
        name: of the factory.
        optimizer: its name, or bytes of its state.
        shard: number of ranks of FSDP2 of which the step is one's; None: the model is not divided.
        training: types, and what is trained.
        n_chunks: of the logits, for `known_in_chunks`.
    """

    def __init__(
        self, factory: str | Callable[..., Any], options: dict[str, Any], gpu: Gpu,
        optimizer: str | int | None = None, shard: int | None = None, training: Training | None = None,
        n_chunks: int = 0,
    ):  # fmt: skip
        state_bytes(optimizer, ())  # an unknown name is refused before the capture
        self.target = factory if isinstance(factory, str) else ""
        self.make: Callable[..., Any] = load_target(factory) if isinstance(factory, str) else factory
        if not callable(self.make) or isinstance(self.make, nn.Module):
            raise InvalidInput(f"give a function that makes the model, not {shown(factory)}")
        self.options, self.gpu, self.optimizer, self.shard = options, gpu, optimizer, shard
        self.training, self.n_chunks = training or Training(), n_chunks
        self.name = self.target.rpartition(":")[2] or getattr(factory, "__name__", "model")
        self.steps: dict[tuple[tuple[str, int], ...], StepAtSize] = {}  # [sizes other than those asked for]
        self.in_chunks: dict[tuple[tuple[str, int], ...], Graph] = {}  # the same with the logits in chunks
        self.repeats: bool | Repeated | None = None  # whether blocks may be repeated, or a step in which they are
        self.copies: Copies | None = None
        self.settings = TraceSettings()
        self.loss: build.Loss | None = None  # that a step was found to have, if it reads no targets
        self._check_sizes()

    def _check_sizes(self) -> None:
        shape = self.options.get("input_size", ())
        if not isinstance(shape, tuple | list) or not all(isinstance(n, int) and n > 0 for n in shape):
            raise InvalidInput(f"input_size must be whole numbers, e.g. (3,224,224), not {shown(shape)}")
        for name in ("batch_size", *LENGTHS):
            size = self.options.get(name, 1)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InvalidInput(f"{name} must be a positive integer, not {shown(size)}")
        try:
            takes = inspect.signature(self.make).parameters
        except ValueError:  # of what Python is made of
            raise InvalidInput(f"give a function that makes the model, not {shown(self.make)}") from None
        if "batch_size" in takes and takes["batch_size"].default is inspect.Parameter.empty:
            if "batch_size" not in self.options:
                raise InvalidInput(f"{self.name} takes batch_size; give it, e.g. batch_size=8")
        elif "batch_size" in self.options and "batch_size" not in takes and "input_size" not in self.options:
            raise InvalidInput(f"{self.name} takes no batch_size; leave it out, or let the factory take it")

    def use(self, gpu: Gpu) -> None:
        """Make steps of another GPU, with other kernels; whether blocks repeat stays known."""
        if gpu is not self.gpu:
            self.gpu, self.copies, self.steps, self.in_chunks, self.settings = gpu, None, {}, {}, TraceSettings()
            self.repeats = True if isinstance(self.repeats, Repeated) else self.repeats

    def holding(self, model: nn.Module, gpu: Gpu | None = None) -> Holding:
        """What a GPU holds beside the values of a step of this model."""
        return Holding.of(model, gpu or self.gpu, self.optimizer, self.shard)

    def describe_sizes(self) -> str:
        """``batch_size=4, length=8192``: the sizes of the step."""
        sizes = {name: self.options.get(name) or self._default(name) for name in ("batch_size", *LENGTHS)}
        return ", ".join(f"{name}={size}" for name, size in sizes.items() if size)

    def step(self, sizes: Mapping[str, int]) -> tuple[DescribedGraph, StepAtSize, nn.Module]:
        """(the step's graph at these sizes without costs, what is known of the step, its model).

        Raises:
            InvalidInput: the factory cannot be used, or its step cannot be captured or followed.
        """
        model, args, loss_fn = self._built(sizes)
        if not any(p.requires_grad for p in model.parameters()):
            raise InvalidInput("nothing in the model needs a gradient")
        beside_bytes = self.holding(model).beside_bytes  # before the capture: what is refused costs no time
        if has_recurrent_layer(model):
            raise InvalidInput("the model has a recurrent layer, whose memory is known only from a step that runs")
        with kernels_of(self.gpu):
            made = described_graph(
                model, args, name=self.name, loss_fn=loss_fn, repeats=self.repeats, autocast=self.training.autocast,
                n_chunks=self.n_chunks, settings=self.settings,
            )  # fmt: skip
            if made.repeated is None:
                self.repeats = False
            elif not isinstance(self.repeats, Repeated):
                self.repeats, self.copies = made.repeated, made.repeated.copies
            if loss_fn is None and len(made.args) == len(args):
                self.loss = made.step.loss_fn
            known_plain = made.followed if self.shard is None else None
            needs = _needs(known_plain) if known_plain else self._needs_of(model, made.step, made.args)
        graph, *other = (
            with_workspaces(each).resized(fixed_bytes=each.fixed_bytes + beside_bytes)
            for each in (made.graph, made.in_chunks) if each is not None
        )  # fmt: skip
        self.in_chunks |= {self._key(sizes): each for each in other}
        known = StepAtSize(graph, needs)
        self.steps.setdefault(self._key(sizes), known)
        return replace(made, graph=graph), known, model

    def _built(self, sizes: Mapping[str, int]) -> tuple[nn.Module, tuple[Any, ...], Any]:
        options: dict[str, Any] = {**self.options, **sizes}
        input_size = tuple(options.pop("input_size", ()))
        batch_size = options.get("batch_size", self._default("batch_size") or 1)
        if "batch_size" not in inspect.signature(self.make).parameters:
            options.pop("batch_size", None)
        dtype, takes = self.training.dtype, inspect.signature(self.make).parameters
        if dtype is not None and "dtype" in takes:
            options, dtype = options | {"dtype": dtype}, None
        if "lora" in takes:
            options["lora"] = self.training.lora
        name = self.target or self.name
        spec = ModelSpec(self.name, "torch", name, batch_size, input_size, dtype=dtype, options=options)
        try:
            model, args, loss_fn = build.build(spec, self.make)
            self.training.prepare(model)
            return model, args, self.loss if loss_fn is None else loss_fn
        except RematError:
            raise
        except Exception as error:  # the user's factory can raise anything
            place = place_in_target(error, self.target)
            raise InvalidInput(f"{spec.target} raised {first_line(error)}{place}") from error

    def needs(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """`StepAtSize.needs` at these sizes, without a capture."""
        model, args, loss_fn = self._built(sizes)
        with kernels_of(self.gpu):
            return self._needs_of(model, *build.loss_step(model, args, loss_fn, self.training.autocast))

    def _needs_of(self, model: nn.Module, step: nn.Module, args: tuple[Any, ...]) -> tuple[int, ...]:
        """`StepAtSize.needs`; of many equal blocks a few are followed where that is known to suffice."""
        if self.copies is None or self.shard is not None:
            return _needs(self._followed(model, step, args))
        with replace(self.copies.row, model=model).cut_to(self.copies.n_blocks):
            shallow = self._followed(model, step, args)
        if self.copies.are_equal(shallow.signatures):
            return tuple(self.copies.deepened(_needs(shallow)))
        return _needs(self._followed(model, step, args))

    def _followed(self, model: nn.Module, step: nn.Module, args: tuple[Any, ...]) -> FollowedStep:
        """The framework's own step."""
        device = "cuda" if self.gpu.compute_capability else "cpu"
        blocks = tuple(blocks_in_rows(model))
        division = WHOLE if self.shard is None else Sharding(self.shard, blocks, device)
        try:
            with division.stands_in(model) as begin:
                return plain_step(step, args, {}, begin=begin)
        except Exception as error:  # fake tensors do not support everything that can be captured
            raise InvalidInput(f"the model does not run on tensors without contents ({first_line(error)})") from error

    def known(self, sizes: Mapping[str, int]) -> StepAtSize:
        """What the step is at these sizes."""
        key = self._key(sizes)
        return self.steps[key] if key in self.steps else self.step(sizes)[1]

    def known_in_chunks(self, sizes: Mapping[str, int]) -> StepAtSize:
        """The step with the logits in chunks at these sizes.

        Raises:
            InvalidInput: its loss is no such one, or it has too few tokens.
        """
        self.known(sizes)
        if self._key(sizes) not in self.in_chunks:
            raise InvalidInput("the logits of so few tokens are left as they are")
        return StepAtSize(self.in_chunks[self._key(sizes)])

    def growing(self) -> Iterator[tuple[str, str, int, int]]:
        """(what grows, its parameter, degree of bytes and work in it, by how much it grows at least)."""
        if self._default("batch_size") or "batch_size" in self.options:
            yield "batch", "batch_size", 1, 1
        name = next((n for n in LENGTHS if self._default(n) or n in self.options), None)
        if name is not None:
            yield "length", name, 2, GRAIN if self._base(name) >= GRAIN else 1

    def sized(self, parameter: str, degree: int, unit: int, *, in_chunks: bool = False) -> StepAtSizes:
        """The step at any size of a parameter, as it is or with the logits in chunks.

        Raises:
            InvalidInput: its operations differ between sizes above 1, or it cannot be captured at one.
        """
        base, known = self._base(parameter), self.known_in_chunks if in_chunks else self.known
        first = -(-max(2, base) // unit) * unit  # size 1 may run other operations
        more = max(1, first // 2)
        is_alike = are_alike(known({}), known({parameter: first}))  # before others are captured in vain
        if not is_alike and base > 1:
            raise InvalidInput(f"the step's operations differ between {parameter}={base} and {first}; explain {first}")
        # A table of positions grows from its length on.
        sizes = [first + -(-more // unit) * unit * i for i in range(degree + 1)]
        return StepAtSizes.of(lambda n: known({parameter: n}), sizes, {} if is_alike else {base: known({})})

    def _base(self, parameter: str) -> int:
        base = self.options.get(parameter) or self._default(parameter)
        assert base is not None
        return base

    def _key(self, sizes: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple((name, n) for name, n in sizes.items() if n != (self.options.get(name) or self._default(name)))

    def _default(self, parameter: str) -> int | None:
        known = inspect.signature(self.make).parameters.get(parameter)
        return known.default if known is not None and isinstance(known.default, int) else None


def _needs(followed: FollowedStep) -> tuple[int, ...]:
    """[calls] bytes held, workspaces by rule included."""
    calls = zip(followed.held_bytes, followed.signatures, strict=True)
    return tuple(held + workspace_of_call(signature) for held, signature in calls)
