"""GPT-2 (Radford et al., 2019) and ViT (Dosovitskiy et al., 2021) in PyTorch, on fused attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm transformer block: attention and a feed-forward layer of four times the width."""

    def __init__(self, width: int, n_heads: int, causal: bool, dropout: float, gelu: str, eps: float):
        super().__init__()
        self.n_heads, self.causal = n_heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate=gelu), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self._attention(self.norm_1(x)))
        return x + self.feed(self.norm_2(x))

    def _attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.qkv(x).view(batch, length, 3, self.n_heads, width // self.n_heads).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        # No dropout on the attention weights: on a CPU it would prevent the fused kernel and store every
        # length x length matrix, which no GPU does.
        out = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.project(out.transpose(1, 2).reshape(batch, length, width))


class GPT2(nn.Module):
    """Language model with tied embeddings; the loss if labels are given, else logits."""

    def __init__(self, vocabulary: int, context: int, width: int, n_layers: int, n_heads: int, dropout: float):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, n_heads, True, dropout, "tanh", 1e-5) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """`ids` and `labels` [batch, length], integer; label i is the token after token i."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        logits = self.head(self.norm(self.blocks(self.drop(x))))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ViT(nn.Module):
    """Image classifier on patches with a class token; logits [batch, classes]."""

    def __init__(
        self, image: int, patch: int, width: int, n_layers: int, n_heads: int, num_classes: int, dropout: float
    ):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, n_heads, False, dropout, "none", 1e-6) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width, 1e-6)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.head(self.norm(self.blocks(self.drop(x + self.positions)))[:, 0])


def gpt2(
    batch_size: int = 8,
    length: int = 1024,
    vocabulary: int = 50257,
    context: int = 1024,
    width: int = 768,
    n_layers: int = 12,
    n_heads: int = 12,
    dropout: float = 0.1,
) -> tuple[GPT2, tuple[Tensor, Tensor]]:
    """GPT-2 small by default, with tokens and labels of shape (batch_size, length)."""
    model = GPT2(vocabulary, max(context, length), width, n_layers, n_heads, dropout)
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return model, (ids, ids.clone())


def vit(
    input_size: tuple[int, ...] = (3, 224, 224),
    patch: int = 16,
    width: int = 768,
    n_layers: int = 12,
    n_heads: int = 12,
    num_classes: int = 1000,
    dropout: float = 0.0,
) -> ViT:
    """ViT-B/16 by default, for square images."""
    return ViT(input_size[-1], patch, width, n_layers, n_heads, num_classes, dropout)
