"""Other implementations of ATen's operators: what their backward pass reads, where they write, with which algorithm.

Pure functions on tensors without autograd, for graphs in which they replace calls of a captured training step, and a
table `IMPLEMENTATIONS` that says of each what it stands for. After MONeT (Shah et al., ICLR 2021).
"""

from remat.torch.implementations._affine import NotInvertible, why_not_invertible
from remat.torch.implementations._batch_norm import batch_norm_backward_from_leaky_relu
from remat.torch.implementations._bits import dense_strides
from remat.torch.implementations._table import IMPLEMENTATIONS
from remat.torch.implementations._types import Calls, Family, TorchImplementation, all_arguments, value_of

__all__ = [
    "IMPLEMENTATIONS",
    "Calls",
    "Family",
    "NotInvertible",
    "TorchImplementation",
    "all_arguments",
    "batch_norm_backward_from_leaky_relu",
    "dense_strides",
    "value_of",
    "why_not_invertible",
]
