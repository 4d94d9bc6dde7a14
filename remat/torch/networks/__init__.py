"""PyTorch networks that configurations name: own compact code, no downloads."""
