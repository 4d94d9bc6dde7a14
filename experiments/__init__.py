"""What to run: sweeps and single budgets over models, GPUs and strategies, their store and engine."""
