"""The best places for `torch.utils.checkpoint` in a model."""
