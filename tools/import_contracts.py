"""A contract for import-linter: only its own package imports a module whose name begins with an underscore."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output


class PrivateModules(Contract):
    """No module imports ``a.b._c`` from outside ``a.b``."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find every import of a private module from outside its package."""
        wrong = [
            f"{importer} -> {imported}"
            for imported in sorted(graph.modules)
            if (owner := owner_of(imported))
            for importer in sorted(graph.find_modules_that_directly_import(imported))
            if not f"{importer}.".startswith(f"{owner}.")
        ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: Any) -> None:
        """Print one import per line."""
        for line in check.metadata["wrong"]:
            output.print_error(line)


def owner_of(module: str) -> str:
    """The package of a private module; '' for a public one and for dunder names such as ``__main__``."""
    parts = module.split(".")
    for at, part in enumerate(parts):
        if at and part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[:at])
    return ""
