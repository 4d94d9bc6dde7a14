"""Whether a step fits a GPU that is not there, and what a GPU said."""
