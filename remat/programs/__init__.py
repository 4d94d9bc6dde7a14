"""Linear, integer and constraint programs: what the solvers and the bounds hand to a solver library."""
