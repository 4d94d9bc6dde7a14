"""A plan for a captured step within a budget."""
