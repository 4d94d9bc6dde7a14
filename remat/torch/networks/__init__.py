"""PyTorch networks for the configurations: our own compact code, no downloads."""
