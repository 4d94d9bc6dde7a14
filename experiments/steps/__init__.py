"""Executed training steps, measured: one harness and one row for PyTorch and Keras, plans and peers, CPU and GPU."""
