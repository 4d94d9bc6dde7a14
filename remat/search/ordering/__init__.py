"""Topological orders with a low peak, and plans on a reordered graph: the free scope."""
