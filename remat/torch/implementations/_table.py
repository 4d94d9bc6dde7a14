"""All implementations by name."""

from remat.torch.implementations import _table_layers, _table_pointwise
from remat.torch.implementations._types import TorchImplementation

IMPLEMENTATIONS: dict[str, TorchImplementation] = {
    made.name: made
    for made in (
        *_table_pointwise.ACTIVATIONS,
        *_table_pointwise.MASKS,
        *_table_pointwise.DROPOUT,
        *_table_layers.MAX_POOL,
        *_table_layers.NORMS,
        *_table_layers.CONVOLUTIONS,
        *_table_pointwise.IN_PLACE,
    )
}
