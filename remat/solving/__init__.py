"""How a solve runs: in this process or a worker process, judged by the simulator, shared between budgets."""
