"""Numbers of chunks of the output projection with its loss, as data."""

from __future__ import annotations

from typing import Any

from remat.torch.implementations import logits
from remat.torch.implementations._types import Calls, Family, TorchImplementation, value_of

NUMBERS = (4, 16, 64)


def _in_chunks(n_chunks: int) -> TorchImplementation:
    def arguments(c: Calls) -> tuple[Any, ...]:
        return (*c.forward[0][:-1], n_chunks)

    def why_not(c: Calls) -> str:
        n_tokens = value_of(c.forward[0][3]).shape[0]
        return "" if n_tokens >= 2 * n_chunks else f"{n_tokens} tokens make no {n_chunks} chunks"

    return TorchImplementation(
        f"cross_entropy_in_{n_chunks}", Family.ALGORITHM, ("remat.linear_cross_entropy",), (), (),
        tuple((0, i) for i in range(4)), forward=logits.linear_cross_entropy, forward_arguments=arguments,
        why_not=why_not, tolerance={"float32": 1e-5, "float64": 1e-12, "bfloat16": 2e-2},
        source="Cut your losses, Wijmans et al., ICLR 2025",
    )  # fmt: skip


CHUNKS = tuple(map(_in_chunks, NUMBERS))
