"""A training step as one graph: how it is captured, what its tensors and calls are, and its code in two halves."""
