"""Copies of values to the host and back while a step runs."""
