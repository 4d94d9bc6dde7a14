"""Searches: greedy, exhaustive, and compiled local search over retention intervals, orders and implementations."""
