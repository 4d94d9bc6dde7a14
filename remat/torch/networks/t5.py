"""T5 (Raffel et al., 2020) in PyTorch: an encoder and a decoder with learned biases of relative positions.

Unlike the paper there is no dropout on the attention weights, and weights start as PyTorch's layers make them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BUCKETS, FARTHEST = 32, 128  # of distances between tokens; those beyond the farthest share a bucket


class Attention(nn.Module):
    """Attention without scaling: self-attention if it gets a bias, else attention to another sequence."""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.size = width // n_heads
        self.query, self.key, self.value, self.project = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, read: Tensor, bias: Tensor | None = None) -> Tensor:
        """`x` [batch, length, width] asks `read` [batch, other length, width]; bias [heads, length, other length]."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(read)), self._heads(self.value(read))
        if bias is None:
            out = F.scaled_dot_product_attention(query, key, value, scale=1.0)
        else:  # written out, because on a CPU no fused kernel differentiates a bias
            out = (query @ key.transpose(2, 3) + bias).softmax(-1) @ value
        return self.project(out.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, self.size)).transpose(1, 2)


class FeedForward(nn.Module):
    """A feed-forward layer with ReLU, or one gated by GELU (Shazeer, 2020) as in T5 1.1."""

    def __init__(self, width: int, hidden: int, gated: bool, dropout: float):
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False) if gated else None
        self.up, self.down = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        y = F.relu(y) if self.gate is None else F.gelu(self.gate(x), approximate="tanh") * y
        return self.down(self.drop(y))


class Block(nn.Module):
    """Self-attention, in a decoder attention to the encoder's output, and a feed-forward layer, each after a norm."""

    def __init__(self, width: int, hidden: int, n_heads: int, gated: bool, dropout: float, reads: bool):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, n_heads)
        self.norm_read = nn.RMSNorm(width, eps=1e-6) if reads else None
        self.reader = Attention(width, n_heads) if reads else None
        self.feed, self.drop = FeedForward(width, hidden, gated, dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor, bias: Tensor, read: Tensor | None = None) -> Tensor:
        y = self.norm_1(x)
        x = x + self.drop(self.attention(y, y, bias))
        if self.reader is not None and self.norm_read is not None and read is not None:
            x = x + self.drop(self.reader(self.norm_read(x), read))
        return x + self.drop(self.feed(self.norm_2(x)))


class Stack(nn.Module):
    """The blocks of an encoder, or of a decoder that reads its output; all share one bias of relative positions."""

    def __init__(self, width: int, hidden: int, n_layers: int, n_heads: int, gated: bool, dropout: float, reads: bool):
        super().__init__()
        self.causal, self.bias, self.drop = reads, nn.Embedding(BUCKETS, n_heads), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, hidden, n_heads, gated, dropout, reads) for _ in range(n_layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        bias, x = self._bias(x.shape[1], x.device), self.drop(x)
        for block in self.blocks:
            x = block(x, bias, read)
        return self.drop(self.norm(x))

    def _bias(self, length: int, device: torch.device) -> Tensor:
        """[heads, length, length], of each query and key; minus infinity where a decoder would look ahead."""
        place = torch.arange(length, device=device)
        ahead = place[None, :] - place[:, None]
        bias = self.bias(_bucket(ahead, not self.causal)).permute(2, 0, 1)
        return bias.masked_fill(ahead > 0, -torch.inf) if self.causal else bias


def _bucket(ahead: Tensor, both_ways: bool) -> Tensor:
    """Bucket of each distance: near ones have their own, far ones share a bucket with others of similar logarithm."""
    n = BUCKETS // 2 if both_ways else BUCKETS
    distance = ahead.abs() if both_ways else (-ahead).clamp(min=0)
    near = n // 2
    rank = (distance.clamp(min=near) / near).log() / math.log(FARTHEST / near) * (n - near)
    bucket = torch.where(distance < near, distance, (near + rank.long()).clamp(max=n - 1))
    return bucket + (ahead > 0) * n if both_ways else bucket


class T5(nn.Module):
    """Sequence-to-sequence model; the loss if labels are given, else logits."""

    def __init__(
        self, vocabulary: int, width: int, hidden: int, n_layers: int, n_heads: int, gated: bool, tied: bool,
        dropout: float,
    ):  # fmt: skip
        super().__init__()
        self.tokens, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.encoder, self.decoder = (
            Stack(width, hidden, n_layers, n_heads, gated, dropout, reads) for reads in (False, True)
        )
        self.scale = width**-0.5 if tied else 1.0
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor, labels: Tensor | None = None) -> Tensor:
        """`ids` [batch, length]; `targets` and `labels` [batch, target length]: label i is the token after target i."""
        x = self.decoder(self.tokens(targets), self.encoder(self.tokens(ids)))
        logits = self.head(x if self.scale == 1 else x * self.scale)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def t5(
    batch_size: int = 16,
    length: int = 512,
    target_length: int | None = None,
    vocabulary: int = 32_128,
    width: int = 768,
    hidden: int = 3072,
    n_layers: int = 12,
    n_heads: int = 12,
    gated: bool = False,
    tied: bool = True,
    dropout: float = 0.1,
    dtype: str = "float32",
) -> tuple[T5, tuple[Tensor, Tensor, Tensor]]:
    """T5 base by default, with tokens for the encoder, and tokens and labels for the decoder.

    Args:
        target_length: tokens of the decoder, by default as many as those of the encoder.
        hidden: width inside the feed-forward layer.
        n_layers: of the encoder, and of the decoder.
        gated: gate the feed-forward layers, as T5 1.1 does.
        tied: let the head be the embedding, which T5 1.1 does not.
        dtype: of the parameters.
    """
    model = T5(vocabulary, width, hidden, n_layers, n_heads, gated, tied, dropout)
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    targets = torch.zeros(batch_size, target_length or length, dtype=torch.long)
    return model.to(getattr(torch, dtype)), (ids, targets, targets.clone())
