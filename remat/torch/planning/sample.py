"""Sample arguments of a step: what they are, where, and stand-ins for tensors without contents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from remat.cost.gpu import DEFAULT_GPU, Gpu, gpu_names, load_gpu
from remat.errors import InvalidInput
from remat.torch.internals.operators import is_fake, tree_leaves, tree_map
from remat.torch.step.work import tensors_of


def describe_inputs(args: Any) -> str:
    """Shapes and dtypes of tensors in a structure of arguments, e.g. ``float32[32, 3, 224, 224]``."""
    return ", ".join(map(_described, tree_leaves(args))) or "no inputs"


def _described(x: Any) -> str:
    if isinstance(x, Tensor):
        place = f"@{x.device.type}" if x.device.type != "cpu" else ""
        return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}{place}"
    plain = isinstance(x, (bool, int, float, complex, str, torch.dtype, type(None)))
    return repr(x)[:40] if plain else type(x).__name__  # other representations may hold an address


def device_of(model: nn.Module, args: Any) -> str:
    """``cpu`` or ``cuda``: the device of all tensors; arguments on ``meta`` go there.

    Raises:
        InvalidInput: there are several devices, or one on which remat cannot measure.
    """
    tensors = [*model.parameters(), *model.buffers(), *(x for x in tensors_of(args) if not x.is_meta)]
    kinds = {x.device.type for x in tensors}
    if len({x.device for x in tensors if x.device.type != "cpu"}) > 1 or kinds - {"cpu", "cuda"}:
        places = ", ".join(sorted({str(x.device) for x in tensors}))
        raise InvalidInput(f"model and sample_args are on {places}; move both to the CPU or to one CUDA device")
    return "cuda" if "cuda" in kinds else "cpu"


def default_gpu(device: str) -> Gpu:
    """The device of the roofline: this machine's GPU if it is known, else a V100; the CPU for a model on the CPU."""
    if device == "cpu":
        return load_gpu("cpu")
    name = torch.cuda.get_device_name().lower().replace(" ", "")
    alike = [load_gpu(known) for known in gpu_names() if known.split("_")[0] in name]  # may differ in memory
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return min(alike, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes), default=load_gpu(DEFAULT_GPU))


def keywords(sample_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keyword arguments as a dict.

    Raises:
        InvalidInput: they are no mapping from names.
    """
    given = {} if sample_kwargs is None else sample_kwargs
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidInput("sample_kwargs must hold the model's keyword arguments by name, e.g. {'mask': mask}")
    return dict(given)


def with_storages(arguments: Any, device: str) -> Any:
    """The arguments, with storages on `device` for tensors without contents, because the compiler needs storages.

    Integers are 0, a valid index.
    """

    def real(x: Any) -> Any:
        if not isinstance(x, Tensor) or not is_fake(x):
            return x
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device if x.is_meta else x.device)
        return empty.requires_grad_(x.requires_grad) if x.is_floating_point() or x.is_complex() else empty.zero_()

    return tree_map(real, arguments)
