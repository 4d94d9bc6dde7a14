"""A model in parts, each with a plan of its own; the calls between them."""
