"""Lower bounds on cost and on memory."""
