"""Output projection and cross-entropy in chunks of tokens, so that the logits of all tokens never exist at once.

A chunk's logits become its loss and, in place, its gradient; its part of the gradients of hidden states and weight is
added up at once. So the backward pass only multiplies by the gradient of the loss. It costs the three matrix products
that the plain calls cost. After Wijmans et al., "Cut your losses in large-vocabulary language models" (ICLR 2025), and
Hsu et al., "Liger kernel" (2024), who fuse the two in kernels; here PyTorch's own kernels run chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat.torch.internals.autograd import retains_graph
from remat.torch.internals.operators import is_fake

MEAN, SUM = 1, 2  # reductions, by PyTorch's numbers
SLICES = 8  # of the vocabulary, in which a chunk's part of the weight's gradient is added in float32
LOW = (torch.bfloat16, torch.float16)
_library = torch.library.Library("remat", "FRAGMENT")
_library.define(
    "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor labels, int[] lead, int[] cut, "
    "int ignore_index, int reduction, float smoothing, ScalarType dtype, bool[] asked, int n_chunks) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, lead: Sequence[int], cut: Sequence[int],
    ignore_index: int, reduction: int, smoothing: float, dtype: torch.dtype, asked: Sequence[bool], n_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(``F.cross_entropy(F.linear(x, weight, bias), labels)``, its gradients by x, weight and bias).

    Args:
        x: [N, width] hidden states.
        weight: [vocabulary, width].
        bias: [vocabulary] or None.
        labels: [T] integers, one for each row that `lead` and `cut` leave.
        lead: the N rows as these dimensions, of which `cut` takes a part; () for all rows.
        cut: (dimension, first, length).
        reduction: `MEAN` or `SUM` over the labels that are not `ignore_index`.
        dtype: of the loss. Logits are widened to it, and at least to float32.
        asked: which of the three gradients are asked for; an empty tensor stands for any other.
        n_chunks: number of chunks. Where there are several, a weight of low precision has its gradient added up in
            float32.

    Workspace: the logits of one chunk, twice if they are widened; float32 gradients of such a weight.
    """
    wide = torch.float32 if dtype in LOW else dtype
    rows = _taken(x, lead, cut).reshape(-1, x.shape[1])
    counts = labels != ignore_index
    n_counting = counts.sum().to(wide)
    share = torch.where(counts, 1 / n_counting if reduction == MEAN else 1.0, 0.0).to(wide)
    safe = torch.where(counts, labels, 0)
    total = torch.zeros((), dtype=wide, device=x.device)
    sums = _Sums(rows, weight, bias is not None, asked, n_chunks)
    size = max(1, -(-len(rows) // n_chunks))
    for first in range(0, len(rows), size):
        at = slice(first, first + size)
        losses, of_logits = _chunk(rows[at], weight, bias, safe[at], share[at], smoothing, wide)
        total += torch.where(counts[at], losses, 0.0).sum()
        sums.add(at, of_logits)
        del of_logits  # before the next chunk's logits
    loss = total / n_counting if reduction == MEAN else total
    return loss.to(dtype), _put_back(sums.of_rows, x, lead, cut), sums.of_weight, sums.of_bias


def _chunk(
    rows: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, share: Tensor, smoothing: float,
    wide: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """([rows] losses, [rows, vocabulary] gradient of the logits in the type of `rows`), in as little memory as can be.

    Args:
        share: [rows] of each loss in the total.
    """
    logits = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
    z = logits.to(wide)
    del logits
    n_classes, labels, share = z.shape[1], labels[:, None], share[:, None]
    z -= z.amax(1, keepdim=True)
    picked = z.gather(1, labels)
    spread = z.sum(1, keepdim=True) if smoothing else picked
    total = z.exp_().sum(1, keepdim=True)
    log_total = total.log()
    losses = (1 - smoothing) * (log_total - picked)
    if smoothing:
        losses += smoothing * (log_total - spread / n_classes)
    z *= share / total
    if smoothing:
        z -= share * (smoothing / n_classes)
    z.scatter_add_(1, labels, (smoothing - 1) * share)
    return losses[:, 0], z.to(rows.dtype)


class _Sums:
    """Gradients as chunks add to them; an empty tensor for one that is not asked for."""

    def __init__(self, rows: Tensor, weight: Tensor, has_bias: bool, asked: Sequence[bool], n_chunks: int):
        self.rows, self.weight = rows, weight
        self.needs_rows, self.needs_weight, self.needs_bias = asked[0], asked[1], asked[2] and has_bias
        self.of_rows = torch.empty_like(rows, memory_format=torch.contiguous_format) if asked[0] else rows.new_empty(0)
        is_low = weight.dtype in LOW and n_chunks > 1
        self.sum_dtype = torch.float32 if is_low else weight.dtype
        shape = weight.shape if asked[1] else (0,)
        self._of_weight = torch.zeros(shape, dtype=self.sum_dtype, device=weight.device)
        n_classes = len(weight) if self.needs_bias else 0
        self._of_bias = torch.zeros(n_classes, dtype=self.sum_dtype, device=weight.device)

    def add(self, at: slice, of_logits: Tensor) -> None:
        rows = self.rows[at]
        if self.needs_rows:
            torch.mm(of_logits, self.weight, out=self.of_rows[at])
        if self.needs_weight and self.sum_dtype == self.weight.dtype:
            self._of_weight.addmm_(of_logits.t(), rows)
        elif self.needs_weight:
            for total, part in zip(self._of_weight.chunk(SLICES), of_logits.chunk(SLICES, 1), strict=True):
                total += part.t() @ rows
        if self.needs_bias:
            self._of_bias += of_logits.sum(0, dtype=self.sum_dtype)

    @property
    def of_weight(self) -> Tensor:
        return self._of_weight.to(self.weight.dtype)

    @property
    def of_bias(self) -> Tensor:
        return self._of_bias.to(self.weight.dtype)


def _taken(x: Tensor, lead: Sequence[int], cut: Sequence[int]) -> Tensor:
    return x.view(*lead, x.shape[1]).narrow(*cut) if cut else x


def _put_back(of_rows: Tensor, x: Tensor, lead: Sequence[int], cut: Sequence[int]) -> Tensor:
    """The gradient of all hidden states, zero for those that `cut` leaves out."""
    if not cut or not of_rows.numel():
        return of_rows
    whole = torch.zeros_like(x, memory_format=torch.contiguous_format)
    part = _taken(whole, lead, cut)
    part.copy_(of_rows.view(part.shape))
    return whole


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, lead: Sequence[int], cut: Sequence[int],
    ignore_index: int, reduction: int, smoothing: float, dtype: torch.dtype, asked: Sequence[bool], n_chunks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty((), dtype=dtype), x.new_empty(x.shape if asked[0] else (0,)),
        weight.new_empty(weight.shape if asked[1] else (0,)),
        weight.new_empty(len(weight) if asked[2] and bias is not None else 0),
    )  # fmt: skip


for key in ("CPU", "CUDA"):
    _library.impl("linear_cross_entropy", linear_cross_entropy, key)
torch.library.register_fake("remat::linear_cross_entropy", _fake, lib=_library)
OPERATOR: Any = torch.ops.remat.linear_cross_entropy.default


def scaled_gradient(x: Tensor, factor: Tensor) -> Tensor:
    """The gradient of the loss times what was computed for a gradient of 1, in the same memory.

    Where the graph is kept for another backward pass, which needs `x` as it is, the result is a copy.
    """
    if is_fake(x):
        return x
    if retains_graph():
        return x * factor
    if x.device.type == "cpu" and factor.item() == 1:
        return x
    return x.mul_(factor)


def workspace_bytes(args: Sequence[Any]) -> int:
    """Workspace of a call of the operator with these arguments, by rule."""
    x, weight, _bias, _labels, _lead, cut, *_, dtype, asked, n_chunks = args
    n_logits, own = x.shape[0] * weight.shape[0], x.element_size()
    wide = max(4, torch.empty((), dtype=dtype, device="meta").element_size())
    chunk = -(-n_logits // n_chunks) * (wide + own if wide > own else own)
    sums = weight.numel() * asked[1] if weight.dtype in LOW and n_chunks > 1 else 0
    rows = 2 * x.numel() * own * bool(cut)
    return chunk + rows + 4 * sums + sums // SLICES * own
