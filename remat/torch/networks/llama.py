"""Llama (Touvron et al., 2023) in PyTorch: RMS norms, rotary positions, grouped heads, gated feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention whose queries share `n_groups` keys and values; pairs of channels turn by position."""

    def __init__(self, width: int, n_heads: int, n_groups: int):
        super().__init__()
        self.size = width // n_heads
        self.query, self.project = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, n_groups * self.size, bias=False)
        self.value = nn.Linear(width, n_groups * self.size, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """`x` [batch, length, width]; cosine and sine [length, head size]."""
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        query, key = _turned(query, cosine, sine), _turned(key, cosine, sine)
        copies = query.shape[1] // key.shape[1]
        if copies > 1:
            key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


def _turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Channel i and channel i + size / 2 as a point in the plane, turned."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after an RMS norm."""

    def __init__(self, width: int, hidden: int, n_heads: int, n_groups: int):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, n_heads, n_groups)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cosine, sine)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Language model; the loss if labels are given, logits otherwise."""

    def __init__(self, vocabulary: int, width: int, hidden: int, n_layers: int, n_heads: int, n_groups: int):
        super().__init__()
        self.tokens, self.size = nn.Embedding(vocabulary, width), width // n_heads
        self.blocks = nn.ModuleList(Block(width, hidden, n_heads, n_groups) for _ in range(n_layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """`ids` and `labels` [batch, length], integer; label i is the token after token i."""
        x = self.tokens(ids)
        cosine, sine = self._angles(ids.shape[1], x)
        for block in self.blocks:
            x = block(x, cosine, sine)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def _angles(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """(cosine, sine) [length, head size] of each position's angles."""
        rate = 10_000 ** (-torch.arange(0, self.size, 2, device=like.device) / self.size)
        angle = torch.outer(torch.arange(length, device=like.device), rate).repeat(1, 2)
        return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def llama(
    batch_size: int = 4,
    length: int = 4096,
    vocabulary: int = 32_000,
    width: int = 4096,
    hidden: int = 11_008,
    n_layers: int = 32,
    n_heads: int = 32,
    n_groups: int | None = None,
    dtype: str = "float32",
) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Llama 2 with 7 billion parameters by default; tokens and labels of shape (batch_size, length).

    Args:
        hidden: width inside the feed-forward layer.
        n_groups: number of keys and values, by default one for each head.
        dtype: of the parameters.
    """
    model = Llama(vocabulary, width, hidden, n_layers, n_heads, n_groups or n_heads).to(getattr(torch, dtype))
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return model, (ids, ids.clone())
