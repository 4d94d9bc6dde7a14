"""The parts of `experiments.monet_paper`."""
