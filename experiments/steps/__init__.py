"""Measurements of executed training steps: one harness and one row for PyTorch, Keras, plans, peers, CPU and GPU."""
