"""Graphs of the networks in the configurations."""
