"""What a step takes: seconds, workspaces and peaks, measured, or known from another step."""
