"""Experiments: sweeps and single budgets over models, GPUs and strategies, with their store and engine."""
