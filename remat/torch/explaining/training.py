"""How a model is trained: in which types, and whether only adapters are."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from remat.errors import InvalidInput, check_name, shown
from remat.torch.step.blocks import blocks_in_rows

# Name -> type of the parameters, type in which matrix products are computed (None: the same)
PRECISIONS = {"bf16": ("bfloat16", None), "fp32": ("float32", None), "mixed": ("float32", torch.bfloat16)}
MOST_RANK = 65536


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained of a model, and in which types.

    Attributes:
        precision: one of `PRECISIONS`; None: as the factory made it.
        lora: rank of the adapters beside the linear layers of blocks; None: everything is trained.

    Raises:
        InvalidInput: an unknown precision, or a rank that is no positive integer.
    """

    precision: str | None = None
    lora: int | None = None

    def __post_init__(self) -> None:
        if self.precision is not None:
            check_name("precision", self.precision, PRECISIONS)
        rank = self.lora
        if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or not 0 < rank <= MOST_RANK):
            raise InvalidInput(
                f"lora must be the rank of the adapters, a positive integer such as 16, not {shown(rank)}"
            )

    @property
    def dtype(self) -> str | None:
        """Of the parameters; None: as the factory made them."""
        return None if self.precision is None else PRECISIONS[self.precision][0]

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of matrix products under autocast; None: without."""
        return None if self.precision is None else PRECISIONS[self.precision][1]

    def prepare(self, model: nn.Module) -> None:
        """Put the adapters into a model, which may have them: a factory may give the same one again.

        Raises:
            InvalidInput: it has no blocks with linear layers.
        """
        if self.lora is not None and not any(isinstance(module, Adapted) for module in model.modules()):
            adapt(model, self.lora)

    def describe(self, model: nn.Module) -> str:
        """What is trained of a prepared model, in one line."""
        dtypes, numbers = Counter[torch.dtype](), Counter[bool]()
        for p in model.parameters():
            dtypes[p.dtype] += p.numel()
            numbers[p.requires_grad] += p.numel()
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype, _ in dtypes.most_common(2))
        if self.autocast is not None:
            types += f", computed in {str(self.autocast).removeprefix('torch.')}"
        whole = _count(numbers.total())
        if self.lora is None:
            what = f"all {whole} parameters" if not numbers[False] else f"{_count(numbers[True])} of {whole} parameters"
            return f"{what}, {types}"
        layers = [name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Adapted)]
        names = ", ".join(dict.fromkeys(layers))
        return (
            f"{_count(numbers[True])} of {whole} parameters, {types}: LoRA of rank {self.lora} beside "
            f"{len(layers)} linear layers ({names})"
        )


def _count(n: int) -> str:
    """``8.03 billion``."""
    for size, name in ((10**9, " billion"), (10**6, " million")):
        if n >= size:
            return f"{n / size:.2f}{name}"
    return f"{n:,}"


class Adapted(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices beside it.

    E. J. Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022; without dropout.
    """

    def __init__(self, base: nn.Module, rank: int):
        super().__init__()
        weight: Any = base.weight
        n_out, n_in = weight.shape if isinstance(base, nn.Linear) else weight.shape[::-1]  # GPT-2's layer is transposed
        self.base = base
        with torch.device("meta"):  # no initial values: those of a large model would take long
            self.down = nn.Linear(n_in, rank, bias=False, dtype=weight.dtype)
            self.up = nn.Linear(rank, n_out, bias=False, dtype=weight.dtype)
        self.down.to_empty(device=weight.device)
        self.up.to_empty(device=weight.device)

    @property
    def weight(self) -> Any:
        """Of the layer: some models ask for its type."""
        return self.base.weight

    @property
    def bias(self) -> Any:
        """Of the layer."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x)) * 2.0  # alpha / rank, a number


def adapt(model: nn.Module, rank: int) -> None:
    """Freeze a model, and put adapters beside the linear layers of its blocks: attention's and the feed-forward's.

    Raises:
        InvalidInput: it has no blocks with linear layers.
    """
    blocks = [model.get_submodule(name) for name in blocks_in_rows(model)]
    places = [(parent, name, child) for block in blocks for parent in block.modules()
              for name, child in parent.named_children() if _is_linear(child)]  # fmt: skip
    if not places:
        raise InvalidInput("lora= needs blocks in a row with linear layers, and the model has none")
    model.requires_grad_(False)
    for parent, name, child in places:
        setattr(parent, name, Adapted(child, rank))


def _is_linear(module: nn.Module) -> bool:
    """Also transformers' ``Conv1D``, which is a linear layer with the transposed weight."""
    return type(module) is nn.Linear or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
