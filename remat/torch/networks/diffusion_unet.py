"""The U-Net of diffusion models (DDPM: Ho et al., 2020) in PyTorch, on fused attention.

Unlike in the paper no weight starts at zero: all start as PyTorch's layers make them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remat.errors import InvalidInput

GROUPS = 32  # of channels, in the norms


class Residual(nn.Module):
    """Two convolutions, each after a norm and SiLU; the embedded time is added between them."""

    def __init__(self, width_in: int, width: int, width_time: int, dropout: float):
        super().__init__()
        self.norm_1, self.norm_2 = _norm(width_in), _norm(width)
        self.conv_1, self.conv_2 = _conv(width_in, width), _conv(width, width)
        self.time, self.drop = nn.Linear(width_time, width), nn.Dropout(dropout)
        self.skip = nn.Identity() if width_in == width else nn.Conv2d(width_in, width, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        """`x` [batch, channels, height, width]; time [batch, channels]."""
        y = self.conv_1(F.silu(self.norm_1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv_2(self.drop(F.silu(self.norm_2(y))))


class Attention(nn.Module):
    """Self-attention between the pixels."""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.n_heads, self.norm = n_heads, _norm(width)
        self.qkv, self.project = nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm(x)).flatten(2).unflatten(1, (3, self.n_heads, -1)).transpose(3, 4)
        out = F.scaled_dot_product_attention(*heads.unbind(1))
        return x + self.project(out.transpose(2, 3).reshape(x.shape))


class Block(nn.Module):
    """A residual block, followed by attention if it has heads."""

    def __init__(self, width_in: int, width: int, width_time: int, n_heads: int, dropout: float):
        super().__init__()
        self.residual = Residual(width_in, width, width_time, dropout)
        self.attention = Attention(width, n_heads) if n_heads else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.attention(self.residual(x, time))


class DiffusionUNet(nn.Module):
    """Guesses the noise in images; the mean squared error if the noise is given, else the guess.

    On the way down every layer leaves a skip; on the way up each block reads one beside its input.

    Args:
        levels: (width, number of attention heads) at each resolution.
        n_blocks: at each resolution on the way down; there is one more on the way up.
    """

    def __init__(self, channels: int, width: int, levels: Sequence[tuple[int, int]], n_blocks: int, n_heads: int,
                 dropout: float):  # fmt: skip
        super().__init__()
        self.width, wide = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, wide), nn.SiLU(), nn.Linear(wide, wide), nn.SiLU())
        self.first, self.down, self.up = _conv(channels, width), nn.ModuleList(), nn.ModuleList()
        skips, now = [width], width
        for i, (size, heads) in enumerate(levels):
            if i:
                self.down.append(_conv(now, now, stride=2))
                skips.append(now)
            for _ in range(n_blocks):
                self.down.append(Block(now, size, wide, heads, dropout))
                skips.append(now := size)
        self.middle = nn.ModuleList(Block(now, now, wide, heads, dropout) for heads in (n_heads, 0))
        for i, (size, heads) in enumerate(reversed(levels)):
            if i:
                self.up.append(_conv(now, now))
            for _ in range(n_blocks + 1):
                self.up.append(Block(now + skips.pop(), size, wide, heads, dropout))
                now = size
        self.last = nn.Sequential(_norm(now), nn.SiLU(), _conv(now, channels))

    def forward(self, x: Tensor, time: Tensor, noise: Tensor | None = None) -> Tensor:
        """`x`, images with noise, and the noise [batch, channels, height, width]; time [batch], integer."""
        embedded = self.time(self._waves(time, x.dtype))
        x = self.first(x)
        skips = [x]
        for layer in self.down:
            x = layer(x, embedded) if isinstance(layer, Block) else layer(x)
            skips.append(x)
        for block in self.middle:
            x = block(x, embedded)
        for layer in self.up:
            if isinstance(layer, Block):
                x = layer(torch.cat([x, skips.pop()], dim=1), embedded)
            else:
                x = layer(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        guess = self.last(x)
        # Not F.mse_loss: the storage of its scalar is as large as the images.
        return guess if noise is None else (guess - noise).square().mean()

    def _waves(self, time: Tensor, dtype: torch.dtype) -> Tensor:
        """[batch, width]: sines and cosines of the time, from fast to slow."""
        half = self.width // 2
        angle = torch.outer(time, 10_000 ** (-torch.arange(half, device=time.device) / (half - 1)))
        return torch.cat([angle.sin(), angle.cos()], dim=1).to(dtype)


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(GROUPS, width), width, eps=1e-6)


def _conv(width_in: int, width: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width_in, width, 3, stride, padding=1)


def diffusion_unet(
    batch_size: int = 128,
    input_size: tuple[int, ...] = (3, 32, 32),
    width: int = 128,
    multipliers: tuple[int, ...] = (1, 2, 2, 2),
    n_blocks: int = 2,
    attention: tuple[int, ...] = (16,),
    n_heads: int = 1,
    dropout: float = 0.1,
    dtype: str = "float32",
) -> tuple[DiffusionUNet, tuple[Tensor, Tensor, Tensor]]:
    """The paper's network for CIFAR-10 by default, with images, times and noise.

    Args:
        width: channels of the first layer; even.
        multipliers: of the width, at each resolution; the resolution halves from one to the next.
        n_blocks: at each resolution on the way down; there is one more on the way up.
        attention: heights of the resolutions that have self-attention; the lowest one always has it, in the middle.
        dtype: of the parameters, images and noise.
    """
    channels, height, columns = input_size
    if height % (smallest := 2 ** (len(multipliers) - 1)) or columns % smallest:
        raise InvalidInput(f"diffusion_unet: {height}x{columns} pixels cannot be halved {len(multipliers) - 1} times")
    levels = [(width * n, n_heads if height // 2**i in attention else 0) for i, n in enumerate(multipliers)]
    kind = getattr(torch, dtype)
    model = DiffusionUNet(channels, width, levels, n_blocks, n_heads, dropout).to(kind)
    images = torch.zeros(batch_size, *input_size, dtype=kind)
    return model, (images, torch.zeros(batch_size, dtype=torch.long), images.clone())
