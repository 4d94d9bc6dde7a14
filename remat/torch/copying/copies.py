"""The copies of one step that runs, and the functions that a step's code calls to make them.

The code of both halves passes a ticket along: a small tensor that the forward half makes and autograd saves for the
backward half. Whoever holds the ticket holds the step's copies; when the last one drops it, because the step is over,
failed or was never finished, they end, and their memory on the host can serve the next step.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from remat.errors import InvalidInput, RematError, first_line
from remat.link import Link
from remat.torch.copying.places import Places
from remat.torch.copying.streams import IN, OUT, STREAMS, Streams
from remat.torch.internals.autograd import retains_graph
from remat.units import format_size

Ticket = Tensor  # [8] uint8, the number of the step's `Copies`
Landed = Tensor | list[Tensor]  # the tensors of a value; a list where its operation gives several of one storage
_numbers = itertools.count()
_of_tickets: weakref.WeakValueDictionary[int, Copies] = weakref.WeakValueDictionary()
_running = threading.local()  # its `copies` are those of the half that runs in this thread


class View(NamedTuple):
    """How a tensor lies in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Hosts:
    """Memory on the host for the steps of a model: one block, as long as one step runs at a time.

    Attributes:
        link: that copies go over.
        free: blocks that no step uses.
    """

    link: Link
    free: list[Tensor] = field(default_factory=list)
    lock: Any = field(default_factory=threading.RLock)  # collecting garbage may give a block back

    def take(self, n_bytes: int, kind: type[Streams]) -> Tensor:
        """A block with so many bytes; smaller ones that nobody uses are given up for it.

        Raises:
            RematError: the host has none.
        """
        with self.lock:
            fitting = [i for i, block in enumerate(self.free) if len(block) >= n_bytes]
            if fitting:
                return self.free.pop(min(fitting, key=lambda i: len(self.free[i])))
            self.free.clear()
        try:
            return kind.host(n_bytes)
        except (MemoryError, RuntimeError) as error:
            raise RematError(
                f"the host has no {format_size(n_bytes)} of memory for a step's copies ({first_line(error)}): give "
                "offload= a link with fewer host_bytes, e.g. remat.Link('25GB/s', '25GB/s', host_bytes='8GB')"
            ) from error

    def give_back(self, block: Tensor) -> None:
        with self.lock:
            self.free.append(block)


class Copies:
    """The copies of one step.

    Attributes:
        flights: [direction, value] (the copy that nobody has waited for yet, the bytes on the device).
        on_host: [value] number of its copy, how its tensors lie in their storage, bytes of this.
        close: ends the copies, and gives the host's memory back; also called when nobody holds the object.
    """

    def __init__(self, places: Places, hosts: Hosts, device: torch.device):
        self.places, self.hosts, self.device = places, hosts, device
        kind = STREAMS[device.type]
        self.memory = hosts.take(places.n_bytes, kind)
        self.streams = kind(hosts.link, device)
        self.flights: dict[tuple[str, int], tuple[Any, Tensor]] = {}
        self.on_host: dict[int, tuple[int, list[View], int]] = {}
        self.close = weakref.finalize(self, _end, self.streams, self.flights, hosts, self.memory)

    def offload(self, value: int, copy: int, tensors: Sequence[Tensor]) -> None:
        """Begin to copy a value to the host."""
        storage = tensors[0].untyped_storage()
        views = [View(x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset())) for x in tensors]
        self.on_host[value] = copy, views, storage.nbytes()
        device_bytes = _bytes_of(storage, self.device)
        pairs = [(there, here) for here, there in self._pieces(copy, device_bytes)]
        self._fly(OUT, value, pairs, device_bytes)

    def prefetch(self, value: int) -> list[Tensor]:
        """Begin to copy a value back; its tensors, which may be read after `arrive`."""
        copy, views, n_bytes = self.on_host[value]
        device_bytes = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        self._fly(IN, value, self._pieces(copy, device_bytes), device_bytes)
        storage = device_bytes.untyped_storage()
        return [
            torch.empty(0, dtype=x.dtype, device=self.device).set_(storage, x.offset, x.size, x.stride) for x in views
        ]

    def wait(self, value: int, *ways: str) -> None:
        """Let the computations wait for the copies of a value in some directions."""
        for way in ways:
            flight = self.flights.pop((way, value), None)
            if flight is None:
                continue
            try:
                self.streams.wait(flight[0])
            except Exception as error:
                n_bytes, where = flight[1].numel(), "to the host" if way == OUT else "from the host"
                raise RematError(f"a copy of {format_size(n_bytes)} {where} failed: {first_line(error)}") from error

    def drop(self, value: int) -> None:
        """Give the host's copy of a value up."""
        self.wait(value, OUT, IN)
        del self.on_host[value]

    def again(self) -> Copies:
        """The same for another backward pass: what is on the host is copied there, so that each pass finds it."""
        for way, value in [*self.flights]:
            self.wait(value, way)
        self.streams.land()
        other = Copies(self.places, self.hosts, self.device)
        other.memory[: self.places.n_bytes].copy_(self.memory[: self.places.n_bytes])
        other.on_host.update(self.on_host)
        return other

    def _fly(self, way: str, value: int, pairs: list[tuple[Tensor, Tensor]], device_bytes: Tensor) -> None:
        """Begin a copy, behind one of the same value the other way."""
        before = self.flights.get((IN if way == OUT else OUT, value))
        after = [] if before is None else [before[0]]
        self.flights[way, value] = self.streams.copy(way, pairs, after), device_bytes

    def _pieces(self, copy: int, device_bytes: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(bytes on the device, bytes on the host), piece by piece."""
        pairs, at = list[tuple[Tensor, Tensor]](), 0
        for start, n in self.places.pieces[copy]:
            n = min(n, len(device_bytes) - at)
            pairs.append((device_bytes[at : at + n], self.memory[start : start + n]))
            at += n
        if at < len(device_bytes):
            raise InvalidInput(f"a tensor takes {len(device_bytes) - at} bytes more than its plan says; plan again")
        return pairs


def _end(streams: Streams, flights: dict[Any, tuple[Any, Tensor]], hosts: Hosts, memory: Tensor) -> None:
    streams.close(bool(flights))
    flights.clear()
    hosts.give_back(memory)


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))  # pyright: ignore[reportArgumentType]


class _Number(bytearray):
    """The memory of a ticket, which lives as long as any tensor on it."""

    copies: Copies


def _ticket_of(copies: Copies) -> Ticket:
    number = next(_numbers)
    memory = _Number(number.to_bytes(8, "little"))
    memory.copies = _of_tickets[number] = copies
    return torch.frombuffer(memory, dtype=torch.uint8)  # which PyTorch's allocator does not count


def _of(ticket: Ticket) -> Copies:
    copies = _of_tickets.get(int.from_bytes(ticket.numpy().tobytes(), "little"))
    if copies is None:
        raise InvalidInput(
            "the tensors that a step saved are gone or were moved: leave hooks on saved tensors (save_on_cpu) out, "
            "and call backward() once for each forward pass"
        )
    return copies


@contextmanager
def ended_on_error() -> Iterator[None]:
    """Run a half: if it fails, or Ctrl-C ends it, its copies end too."""
    try:
        yield
    except BaseException:
        if (copies := getattr(_running, "copies", None)) is not None:
            copies.close()
        raise
    finally:
        _running.copies = None


@dataclass(frozen=True, slots=True)
class Copying:
    """What the code of a plan needs to copy.

    Attributes:
        device: of the tensors.
    """

    places: Places
    hosts: Hosts
    device: torch.device

    @property
    def begin(self) -> Callable[[], Ticket]:
        """The call with which a forward half begins."""

        def begin_copies() -> Ticket:
            _running.copies = Copies(self.places, self.hosts, self.device)
            return _ticket_of(_running.copies)

        return begin_copies


# What the code of a step calls. `known` is unused: it makes a call depend on an earlier one.


@fx.has_side_effect
def begin_backward(ticket: Ticket) -> Ticket:
    """With which a backward half begins; a graph that is retained keeps what is on the host."""
    copies = _of(ticket)
    if retains_graph():
        copies = copies.again()
        ticket = _ticket_of(copies)
    _running.copies = copies
    return ticket


@fx.has_side_effect
def offload(ticket: Ticket, value: int, copy: int, *tensors: Tensor) -> None:
    """Begin to copy a value to the host; what it returns stands for the copy."""
    _of(ticket).offload(value, copy, tensors)


@fx.has_side_effect
def prefetch(ticket: Ticket, value: int, n_tensors: int, known: None = None) -> Landed:
    """Begin to copy a value back."""
    tensors = _of(ticket).prefetch(value)
    return tensors[0] if n_tensors == 1 else tensors


@fx.has_side_effect
def arrive(ticket: Ticket, value: int, *tensors: Tensor) -> None:
    """Wait for a value that is read next."""
    _of(ticket).wait(value, IN)


@fx.has_side_effect
def free(ticket: Ticket, value: int, *tensors: Tensor) -> None:
    """Wait for the copies of a value whose tensors are dropped next: the caller's code drops arguments read last."""
    _of(ticket).wait(value, OUT, IN)


@fx.has_side_effect
def drop(ticket: Ticket, value: int, known: None = None) -> None:
    """Give the host's copy of a value up."""
    _of(ticket).drop(value)
