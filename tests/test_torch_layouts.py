"""Tensors without contents have the layouts and storages of what CPU kernels make, call by call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import random_modules
import torch
from random_loops import squares
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from remat.torch.step.layouts import layouts_of_kernels

aten = torch.ops.aten
# All but the last are an operation of remat's own in a step; the last keeps 8 bytes more than its result.
NOT_COMPARED = {
    aten.rrelu_with_noise.default, aten.rrelu_with_noise_backward.default,
    aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default, aten._embedding_bag.default,
}  # fmt: skip


class Compared(TorchDispatchMode):
    """Runs every call also without contents, and collects where the results lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.unlike: list[str] = []
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        aliases = any(r.alias_info is not None for r in func._schema.returns)
        fakes = None if aliases or func in NOT_COMPARED else self._without_contents(func, args, kwargs)
        made = func(*args, **kwargs)
        if fakes is not None:
            self.n += 1
            for real, fake in zip(tree_leaves(made), tree_leaves(fakes), strict=True):
                asked = isinstance(real, torch.Tensor) and isinstance(fake, torch.Tensor)
                if asked and _place(real) != _place(fake):
                    self.unlike.append(f"{func}: {_place(real)}, not {_place(fake)}")
        return made

    def _without_contents(self, func: Any, args: Any, kwargs: Any) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        args, kwargs = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x, (args, kwargs))
        try:
            with mode:
                return func(*args, **kwargs)
        except RuntimeError:  # the result's shape depends on values
            return None


def _place(x: Any) -> tuple[list[int], list[int], int]:
    """Shape, strides (where they say something) and bytes of the storage."""
    strides = [stride for n, stride in zip(x.shape, x.stride(), strict=True) if n > 1]
    return list(x.shape), strides if x.numel() else [], x.untyped_storage().nbytes()


def turned(*shape: int) -> Any:
    """Random numbers whose last two dimensions are swapped in memory."""
    return torch.rand(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2)


def normalised(gradient: Any, x: Any) -> Any:
    weight, bias = torch.rand(x.shape[-1]), torch.rand(x.shape[-1])
    _, mean, deviation = aten.native_layer_norm(x, x.shape[-1:], weight, bias, 1e-5)
    return aten.native_layer_norm_backward(
        gradient, x, x.shape[-1:], mean, deviation, weight, bias, [True, False, True]
    )


def padded(mode: str, shape: tuple[int, ...], memory_format: Any) -> None:
    x = torch.rand(shape).contiguous(memory_format=memory_format).requires_grad_()
    torch.nn.functional.pad(x, (1, 1) * (len(shape) - 2), mode).square().sum().backward()


@pytest.mark.parametrize(
    "call",
    [
        lambda: padded("replicate", (2, 8, 4, 4), torch.channels_last),
        lambda: padded("reflect", (2, 8, 4, 4, 4), torch.channels_last_3d),
        lambda: normalised(turned(7, 5, 8), turned(7, 5, 8)),
        lambda: aten.native_layer_norm(turned(7, 5, 8).bfloat16(), [8], torch.rand(8), torch.rand(8), 1e-5),
        lambda: aten.hardsigmoid_backward(torch.rand(13, 8, 8), turned(13, 8, 8)),
        lambda: [aten.pow.Scalar(base, turned(10, 5)) for base in (1.0, 2.0)],
    ],
)
def test_layouts_by_hand(call: Any) -> None:
    with layouts_of_kernels(), Compared() as compared:
        call()
    assert compared.n
    assert compared.unlike == []


def test_layouts_of_the_calls_of_random_modules() -> None:
    with layouts_of_kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(8):
            case = random_modules.make(seed)
            with Compared() as compared:
                with case.context():
                    outputs = case.model(*case.args, **case.kwargs)
                squares(outputs).backward()
            assert compared.n
            assert compared.unlike == [], seed


def test_a_result_that_is_kept_is_not_that_of_other_settings() -> None:
    """PyTorch's keys do not say whether only deterministic kernels may run, which this operator has none of."""

    def unpool() -> torch.Tensor:
        with layouts_of_kernels(), FakeTensorMode():
            x = torch.empty(1, 1, 2, 2)
            return torch.nn.functional.max_unpool2d(x, torch.zeros(1, 1, 2, 2, dtype=torch.int64), 2)

    assert unpool().shape == (1, 1, 4, 4)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="deterministic"):
            unpool()
    finally:
        torch.use_deterministic_algorithms(False)
    assert unpool().shape == (1, 1, 4, 4)
