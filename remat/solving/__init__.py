"""How a solve runs: in this process or a worker, judged by the simulator, shared between budgets."""
