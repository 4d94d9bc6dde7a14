"""Keras networks that configurations name: compact code of our own, no downloads."""
