"""The project's own source files, parsed, for the tests that read them."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("ctxfs", "mountd", "tools", "bench", "demo", "tests")


@dataclass(frozen=True, eq=False)
class Source:
    """One module. `name` is dotted; a package has its own name, without `__init__`."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The top-level package."""
        return self.name.partition(".")[0]

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    def imports(self) -> Iterator[str]:
        """What it imports, dotted and absolute; of `from a import b`, both `a` and `a.b`."""
        is_package = self.path.name == "__init__.py"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    drop = node.level - is_package
                    above = self.name.split(".")[: -drop or None]
                    base = ".".join([*above, *filter(None, [base])])
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)


@cache
def sources() -> tuple[Source, ...]:
    """Every module of the project."""
    found = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            text = path.read_text(encoding="utf-8")
            found.append(Source(path, name, text, ast.parse(text, path)))
    return tuple(found)
