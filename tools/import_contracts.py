"""A contract for import-linter: a module whose name begins with an underscore belongs to its package."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class PrivateModules(Contract):
    """No module imports ``a.b._c`` from outside ``a.b``."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Compare each import with the package that the private module lies in."""
        wrong = []
        for imported in sorted(graph.modules):
            owner = owner_of(imported)
            if owner:
                importers = graph.find_modules_that_directly_import(imported)
                wrong += [
                    f"{name} -> {imported}" for name in sorted(importers) if not f"{name}.".startswith(f"{owner}.")
                ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: Any) -> None:
        """Print one import a line."""
        for line in check.metadata["wrong"]:
            output.print_error(line)


def owner_of(module: str) -> str:
    """The package that a private module lies in; '' for a public one, and for ``__main__`` and the like."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if at and part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:at])
    return ""
