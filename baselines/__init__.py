"""Published heuristics, one file each; found through the registry."""
