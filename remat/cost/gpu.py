"""The data of a device that a roofline needs, and the devices that come with remat (``gpus/*.json``).

``python -m remat.torch.measuring.cpu`` measures the CPU at hand as ``gpus/cpu.json`` was measured.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from remat.errors import InvalidInput, check_name
from remat.files import read_json
from remat.link import LINKS, Link, is_auto, parse_link

GPU_FOLDER = Path(__file__).resolve().parent / "gpus"
DEFAULT_GPU = "v100"
COMMENTS = {"about", "sources"}  # keys of a file for human readers

# Achieved fractions of the peaks, used for every GPU: medians over 646 operations measured on a P100
# (docs/results/roofline.md shows how well they carry from network to network). No measurement covers matrix units.
EFFICIENCY = {
    "convolution": 0.76,
    "matmul": 0.57,
    "normalization": 0.33,
    "pooling": 0.58,
    "pooling_backward": 0.15,
    "memory": 0.70,
}
_PATTERNS = (
    ("normalization", re.compile(r"norm(?!al(?!iz))")),  # not random normals
    ("pooling", re.compile(r"pool")),
    ("convolution", re.compile(r"conv(?!ert)")),
    ("matmul", re.compile(r"matmul|dense|einsum|attention|(^|[._:])(mm|addmm|bmm|baddbmm|linear)($|[._])")),
)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device as a roofline sees it.

    Attributes:
        name: the stem of its file, e.g. ``v100``.
        memory_bytes: of the device; figures mark it as a budget.
        bandwidth_bytes_per_s: peak, of the device memory.
        launch_overhead_s: added to every operation that is not free.
        peak_flops: [dtype] FLOP/s, 2 per multiply-add. ``float32`` is required and is the rate of the
            vector units; ``float16``, ``bfloat16`` and ``tf32`` are those of the matrix units, if the device
            has any, and are used for matrix work only (see `matrix_dtype`).
        efficiency: achieved fractions of the peaks: ``convolution`` and ``matmul`` of the arithmetic,
            ``memory``, ``normalization``, ``pooling`` and ``pooling_backward`` of the bandwidth.
        compute_capability: of a CUDA GPU, times 10: PyTorch chooses kernels by it. 0 for other devices.
        link: name of its link to the host's memory (`remat.link.LINKS`), or ''.

    Raises:
        InvalidInput: a rate that is missing, not positive, or a fraction outside (0, 1].
    """

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    launch_overhead_s: float
    peak_flops: dict[str, float]
    efficiency: dict[str, float] = field(default_factory=lambda: dict(EFFICIENCY))
    compute_capability: int = 0
    link: str = ""

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flops:
            raise InvalidInput(f"gpu '{self.name}': peak_flops needs at least a float32 rate")
        rates = {"memory_bytes": self.memory_bytes, "bandwidth_bytes_per_s": self.bandwidth_bytes_per_s}
        for what, rate in (rates | {f"peak_flops.{d}": r for d, r in self.peak_flops.items()}).items():
            if not rate > 0:
                raise InvalidInput(f"gpu '{self.name}': {what} must be positive, not {rate}")
        if self.launch_overhead_s < 0:
            raise InvalidInput(f"gpu '{self.name}': launch_overhead_s must not be negative")
        if self.efficiency.keys() != EFFICIENCY.keys():
            wrong = ", ".join(sorted(self.efficiency.keys() ^ EFFICIENCY.keys()))
            raise InvalidInput(f"gpu '{self.name}': efficiency needs exactly {', '.join(EFFICIENCY)}; not so: {wrong}")
        if self.link and self.link not in LINKS:
            raise InvalidInput(f"gpu '{self.name}': link must be {', '.join(LINKS)}, not '{self.link}'")
        for what, fraction in self.efficiency.items():
            if not 0 < fraction <= 1:
                raise InvalidInput(f"gpu '{self.name}': efficiency.{what} must be in (0, 1], not {fraction}")


@functools.cache
def operation_class(kind: str) -> str:
    """``convolution``, ``matmul``, ``normalization``, ``pooling`` or ``other``, by the name of its kind."""
    kind = kind.lower()
    return next((name for name, pattern in _PATTERNS if pattern.search(kind)), "other")


def matrix_dtype(kind: str, dtype: str, gpu: Gpu) -> str:
    """The dtype whose peak bounds an operation.

    Matrix units do matrix work only; everything else runs at the float32 (or float64) rate. By default both frameworks
    compute float32 convolutions in TF32, and TensorFlow also matrix products; PyTorch does not (checked with torch
    2.13, tensorflow 2.21).
    """
    matrix_work = operation_class(kind) in ("convolution", "matmul")
    if dtype == "float32" and matrix_work and "tf32" in gpu.peak_flops:
        is_torch_product = kind.startswith(("aten", "remat")) and operation_class(kind) == "matmul"
        return "float32" if is_torch_product else "tf32"
    if dtype in gpu.peak_flops and (matrix_work or dtype == "float64"):
        return dtype
    return "float32"


def gpu_names() -> list[str]:
    """Names of the devices that come with remat."""
    return sorted(path.stem for path in GPU_FOLDER.glob("*.json"))


def describe_gpu(name: str) -> dict[str, Any]:
    """The fields of that device's `Gpu`, as in its file.

    Raises:
        UnknownName: with the nearest names.
        InvalidInput: the file does not describe a device.
    """
    name = name.lower() if isinstance(name, str) else name
    check_name("gpu", name, gpu_names())
    path = GPU_FOLDER / f"{name}.json"
    content = read_json(path)
    names = {f.name for f in fields(Gpu)}
    if not isinstance(content, dict) or not set(content) <= names | COMMENTS:
        raise InvalidInput(f"{path}: its keys must be among {', '.join(sorted(names | COMMENTS))}")
    return {key: value for key, value in content.items() if key not in COMMENTS}


def load_gpu(name: str = DEFAULT_GPU) -> Gpu:
    """The device of that name; raises as `describe_gpu`."""
    return Gpu(**describe_gpu(name))


def link_of(gpu: Gpu, link: Link | str | None) -> Link | None:
    """A link as `remat.link.parse_link` reads it, or the GPU's own for ``auto``.

    Raises:
        InvalidInput: no link, or the GPU has none.
    """
    if not is_auto(link):
        return parse_link(link)
    if not gpu.link:
        raise InvalidInput(f"gpu '{gpu.name}' has no link to a host; write e.g. link=12GB/s")
    return parse_link(gpu.link)
