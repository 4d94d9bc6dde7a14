"""Plans for what Inductor generates."""
