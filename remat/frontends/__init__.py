"""Frontends: each turns a network into a `Graph`. Frameworks are imported only when used."""
