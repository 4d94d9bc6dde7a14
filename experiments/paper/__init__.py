"""The parts of `experiments.checkmate`."""
