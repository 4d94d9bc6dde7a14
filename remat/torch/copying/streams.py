"""What copies bytes between device and host beside the computations: threads for a model on the CPU, streams on CUDA.

Both have the same methods, and only they differ between devices. In both, copies of one direction run one after the
other. What "the computations" are is the calling thread on a CPU, and the current stream on CUDA.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from remat.link import NS, Link

OUT, IN = "out", "in"  # to the host, from it


class OnCpu:
    """A thread for each direction; a copy lasts as long as it would over the link, or as the machine needs.

    The threads end with `close`, and when nobody holds the object.
    """

    def __init__(self, link: Link, device: torch.device):
        self.link = link
        self.threads = {way: ThreadPoolExecutor(1, f"remat-copy-{way}") for way in (OUT, IN)}
        self.ended = {OUT: 0.0, IN: 0.0}  # when the direction's last copy has ended
        self.closing = threading.Event()

    @staticmethod
    def host(n_bytes: int) -> Tensor:
        """Bytes on the host, which PyTorch's allocator does not count."""
        return torch.from_numpy(np.empty(n_bytes, np.uint8))

    def copy(self, way: str, pairs: list[tuple[Tensor, Tensor]], after: Sequence[Future[None]]) -> Future[None]:
        """Begin to copy, behind all that was computed so far and behind the copies `after`.

        Args:
            pairs: (target, source), bytes; taken over.

        Returns:
            What `wait` takes.
        """
        return self.threads[way].submit(self._run, way, pairs, after, time.perf_counter())

    def wait(self, copy: Future[None]) -> None:
        """Let the computations wait for a copy; raises what the copy raised."""
        copy.result()

    def land(self) -> None:
        """Return when all copies that were waited for have ended."""

    def close(self, in_flight: bool) -> None:
        """Give copies up that have not begun, and wait for those that have.

        Args:
            in_flight: whether nobody has waited for some of them.
        """
        self.closing.set()
        for threads in self.threads.values():
            threads.shutdown(wait=True, cancel_futures=True)

    def transfer(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Copy now. NumPy copies in this thread alone, without Python's lock."""
        for target, source in pairs:
            np.copyto(target.numpy(), source.numpy())

    def _run(self, way: str, pairs: list[tuple[Tensor, Tensor]], after: Sequence[Future[None]], asked: float) -> None:
        try:
            started, late = max(asked, self.ended[way]), [copy for copy in after if not copy.done()]
            for copy in after:
                copy.result()
            started = max(started, time.perf_counter()) if late else started
            size = sum(target.numel() for target, _ in pairs)
            until = started + (self.link.out_ns(size) if way == OUT else self.link.in_ns(size)) / NS
            self.transfer(pairs)
        finally:
            pairs.clear()  # else this thread may drop the tensors after the step has gone on
        done = time.perf_counter()
        self.closing.wait(max(0.0, until - done))
        self.ended[way] = max(until, done)  # not when the wait ended: what it is late must not add up


class OnCuda:
    """A stream for each direction; the link is the real one."""

    def __init__(self, link: Link, device: torch.device):
        self.device, self.streams = device, _streams_of(device)

    @staticmethod
    def host(n_bytes: int) -> Tensor:
        """Page-locked bytes on the host, not rounded up as PyTorch's allocator of such memory would."""
        memory = np.empty(n_bytes, np.uint8)
        if n_bytes:
            runtime: Any = torch.cuda.cudart()
            address = memory.ctypes.data
            code = int(runtime.cudaHostRegister(address, n_bytes, 0))
            if code:
                raise MemoryError(f"cudaHostRegister gives error {code}")
            weakref.finalize(memory, runtime.cudaHostUnregister, address)
        return torch.from_numpy(memory)

    def copy(self, way: str, pairs: list[tuple[Tensor, Tensor]], after: Sequence[Any]) -> Any:
        """See `OnCpu.copy`."""
        stream = self.streams[way]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return stream.record_event()

    def wait(self, copy: Any) -> None:
        """See `OnCpu.wait`."""
        torch.cuda.current_stream(self.device).wait_event(copy)

    def land(self) -> None:
        """See `OnCpu.land`."""
        for stream in self.streams.values():
            stream.synchronize()

    def close(self, in_flight: bool) -> None:
        """See `OnCpu.close`."""
        if in_flight:
            self.land()


Streams = OnCpu | OnCuda
STREAMS: dict[str, type[Streams]] = {"cpu": OnCpu, "cuda": OnCuda}


@functools.cache
def _streams_of(device: torch.device) -> dict[str, Any]:
    return {way: torch.cuda.Stream(device) for way in (OUT, IN)}
