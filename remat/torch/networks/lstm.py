"""An LSTM language model (Zaremba et al., 2014) in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LstmLanguageModel(nn.Module):
    """Embedding, stacked LSTM with dropout, decoder; the loss if labels are given, else logits."""

    def __init__(self, vocabulary: int, width: int, n_layers: int, dropout: float):
        super().__init__()
        self.embed, self.drop = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.lstm = nn.LSTM(width, width, n_layers, dropout=dropout, batch_first=True)
        self.decode = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """`ids` and `labels` [batch, length], integer; label i is the token after token i."""
        logits = self.decode(self.drop(self.lstm(self.drop(self.embed(ids)))[0]))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm(
    batch_size: int = 20,
    length: int = 35,
    vocabulary: int = 10_000,
    width: int = 650,
    n_layers: int = 2,
    dropout: float = 0.5,
) -> tuple[LstmLanguageModel, tuple[Tensor, Tensor]]:
    """The medium model of the paper by default, with tokens and labels of shape (batch_size, length)."""
    ids = torch.zeros(batch_size, length, dtype=torch.long)
    return LstmLanguageModel(vocabulary, width, n_layers, dropout), (ids, ids.clone())
