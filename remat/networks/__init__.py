"""Networks that the frontends can build: own compact code, no downloads."""
