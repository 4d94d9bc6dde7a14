"""Modules that run a plan."""
