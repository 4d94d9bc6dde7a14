"""Llama (Touvron et al., 2023) in PyTorch: RMS norms, rotary positions, grouped heads, gated feed-forward layers."""

from __future__ import annotations

import math

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


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """A mixture of gated feed-forward layers of which each token takes two (Mixtral: Jiang et al., 2024).

    An expert takes at most `capacity` times its even share of tokens; it drops the rest (Switch Transformer: Fedus et
    al., 2022). So shapes do not depend on the data.
    """

    def __init__(self, width: int, hidden: int, n_experts: int, capacity: float = 1.25):
        super().__init__()
        self.router, self.capacity = nn.Linear(width, n_experts, bias=False), capacity
        self.gate, self.up = (nn.Parameter(torch.randn(n_experts, width, hidden) * 0.02) for _ in range(2))
        self.down = nn.Parameter(torch.randn(n_experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """`x` [batch, length, width]."""
        tokens, n_experts = x.flatten(0, 1), len(self.gate)
        room = math.ceil(2 * len(tokens) / n_experts * self.capacity)
        weights, expert = self.router(tokens).softmax(-1).topk(2)
        weights, expert = (weights / weights.sum(-1, keepdim=True)).flatten(), expert.flatten()
        before = F.one_hot(expert, n_experts).cumsum(0)  # [pairs, experts] that took it so far
        place = before.gather(1, expert[:, None])[:, 0] - 1
        row = torch.where(place < room, expert * room + place, n_experts * room)  # the last row is for what is dropped
        copies = tokens.repeat_interleave(2, 0)
        taken = tokens.new_zeros(n_experts * room + 1, tokens.shape[1]).index_copy(0, row, copies)[:-1]
        y = taken.unflatten(0, (n_experts, room))
        made = torch.bmm(F.silu(torch.bmm(y, self.gate)) * torch.bmm(y, self.up), self.down).flatten(0, 1)
        own = F.pad(made, (0, 0, 0, 1)).index_select(0, row) * weights[:, None]
        return own.unflatten(0, (-1, 2)).sum(1).view_as(x)


class Block(nn.Module):
    """Attention and a feed-forward layer, or experts, each after an RMS norm."""

    def __init__(self, width: int, hidden: int, n_heads: int, n_groups: int, n_experts: int = 0):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.attention = Attention(width, n_heads, n_groups)
        self.feed = Experts(width, hidden, n_experts) if n_experts else FeedForward(width, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), cosine, sine)
        return x + self.feed(self.norm_2(x))


class Llama(nn.Module):
    """Language model; the loss if labels are given, else logits."""

    def __init__(self, vocabulary: int, width: int, hidden: int, n_layers: int, n_heads: int, n_groups: int,
                 n_experts: int = 0):  # fmt: skip
        super().__init__()
        self.tokens, self.size = nn.Embedding(vocabulary, width), width // n_heads
        self.blocks = nn.ModuleList(Block(width, hidden, n_heads, n_groups, n_experts) for _ in range(n_layers))
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
    n_experts: int = 0,
    dtype: str = "float32",
) -> tuple[Llama, tuple[Tensor, Tensor]]:
    """Llama 2 with 7 billion parameters by default; tokens and labels of shape (batch_size, length).

    Args:
        hidden: width inside the feed-forward layer.
        n_groups: number of keys and values, by default one for each head.
        n_experts: feed-forward layers in a block, of which each token takes two; 0 for a single one.
        dtype: of the parameters.
    """
    model = Llama(vocabulary, width, hidden, n_layers, n_heads, n_groups or n_heads, n_experts)
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return model.to(getattr(torch, dtype)), (ids, ids.clone())
