"""Other implementations of ATen's operators: other tensors read backward, other memory written, other algorithms.

Pure functions on tensors without autograd, for graphs in which they replace calls of a captured training step. The
table `IMPLEMENTATIONS` says which calls each of them replaces. After MONeT (Shah et al., ICLR 2021).
"""

from remat.torch.implementations import _table_layers, _table_pointwise
from remat.torch.implementations._bits import dense_strides
from remat.torch.implementations._norms import NotInvertible, batch_norm_backward_from_leaky_relu, why_not_invertible
from remat.torch.implementations._types import Calls, Family, TorchImplementation, all_arguments, value_of

IMPLEMENTATIONS: dict[str, TorchImplementation] = {
    implementation.name: implementation
    for implementation in (
        *_table_pointwise.ACTIVATIONS,
        *_table_pointwise.MASKS,
        *_table_pointwise.DROPOUT,
        *_table_layers.MAX_POOL,
        *_table_layers.NORMS,
        *_table_layers.CONVOLUTIONS,
        *_table_pointwise.IN_PLACE,
        *_table_layers.CHUNKS,
    )
}

__all__ = [
    "IMPLEMENTATIONS", "Calls", "Family", "NotInvertible", "TorchImplementation", "all_arguments",
    "batch_norm_backward_from_leaky_relu", "dense_strides", "value_of", "why_not_invertible",
]  # fmt: skip
