"""What the source alone shows: sizes, class names that stand for several things, modules that import each other."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PackageShape:
    """Describes one package. `circles`: groups of modules that import each other, for types as well, each sorted;
    `twice`: the modules of each class name that is defined more than once.
    """

    files: int
    lines: int
    short_files: int
    circles: list[list[str]]
    twice: dict[str, list[str]]


SHORT_LINES = 60


def shape_of(tree: Path, package: str) -> PackageShape:
    """Reads all of its sources."""
    sources = {_module(tree, path): path.read_text(encoding="utf-8") for path in sorted((tree / package).rglob("*.py"))}
    parsed = {module: ast.parse(source) for module, source in sources.items()}
    sizes = [source.count("\n") for source in sources.values()]
    imports = {module: _imports(module, node, parsed) for module, node in parsed.items()}
    classes = defaultdict(list)
    for module, node in parsed.items():
        for one in node.body:
            if isinstance(one, ast.ClassDef):
                classes[one.name].append(module)
    return PackageShape(
        files=len(sizes),
        lines=sum(sizes),
        short_files=sum(0 < size < SHORT_LINES for size in sizes),
        circles=circles(imports),
        twice={name: modules for name, modules in classes.items() if len(modules) > 1},
    )


def lines_of(folder: Path) -> int:
    """Counts the lines of all Python files below."""
    return sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob("*.py"))


def _module(tree: Path, path: Path) -> str:
    parts = path.relative_to(tree).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(module: str, tree: ast.Module, known: dict[str, ast.Module]) -> set[str]:
    """Modules of the package that this one imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return {name for name in found if name in known and name != module}


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        stack.append(module)
        for other in imports[module]:
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            at = stack.index(module)
            group, stack[at:] = stack[at:], []
            if len(group) > 1:
                found.append(sorted(group))

    for module in imports:
        if module not in order:
            visit(module)
    return sorted(found)
