"""Linear, integer and constraint programs that the solvers and the bounds hand to a solver library."""
