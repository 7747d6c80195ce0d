"""House rules that no linter knows: sizes of files and classes, what importing costs, what stays out of the code."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvoffloadd
from scripts.shape.modules import shape_of

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvoffloadd"
FILES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

Rule = Callable[[Path], Iterator[str]]
"""What of a file breaks it."""
FILE_LINES_MAX, CLASS_LINES_MAX = 400, 300
HEAVY = {"torch", "cupy", "cuda"}
TWINS = {
    "Registration": "server",
    **dict.fromkeys(
        ("Cleared", "Deleted", "Drained", "Found", "PrefetchedClaims", "Ready", "Reserved", "Retained"), "protocol"
    ),
    "Allocation": "device",
    "Job": "cache",
    "Promotion": "cache",
}
"""Classes of the client that have the name of their other half, and the room where that is."""
PREPOSITIONS = {
    "Of", "As", "From", "In", "To", "With", "Within", "By", "On", "Behind", "Through", "Under", "For", "Until", "At",
    "After", "Before", "Without", "Between", "Into", "Over", "Per", "Like", "Against", "Beside", "But", "Among",
    "Above", "Below", "Inside", "Outside",
}  # fmt: skip


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def code_lines(path: Path) -> set[int]:
    """Lines that hold code: neither blank, nor comment, nor docstring."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
    lines: set[int] = set()
    with tokenize.open(path) as stream:
        for token in tokenize.generate_tokens(stream.readline):
            if token.type not in quiet and token.type != tokenize.ENDMARKER:
                lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree(path)):
        # A string that stands alone: a docstring of a module, class, function or constant.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def imports_when_loaded(body: list[ast.stmt]) -> Iterator[str]:
    """Top-level names of what a module imports when it is itself imported: not in functions, not for types alone."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imports_when_loaded(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imports_when_loaded(
                [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]
            )


def large(path: Path) -> Iterator[str]:
    lines = code_lines(path)
    if len(lines) > FILE_LINES_MAX:
        yield f"{len(lines)} lines of code"
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ClassDef):
            inside = lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            if len(inside) > CLASS_LINES_MAX:
                yield f"{node.name} has {len(inside)} lines of code"


def asserts(path: Path) -> Iterator[str]:
    yield from (f"line {node.lineno}" for node in ast.walk(tree(path)) if isinstance(node, ast.Assert))


def without_docstring(path: Path) -> Iterator[str]:
    if not tree(path).body:
        return
    if not ast.get_docstring(tree(path)):
        yield "has no docstring"
    if path.name != "__init__.py" and "from __future__ import annotations" not in path.read_text(encoding="utf-8"):
        yield "evaluates annotations"


def fragments(path: Path) -> Iterator[str]:
    """Finds docstrings that begin with a preposition: they lack a subject or a verb, or hide it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            words = (ast.get_docstring(node) or "").split()
            if words and words[0].strip("`,.:;") in PREPOSITIONS:
                yield f"{getattr(node, 'name', 'module')}: {' '.join(words[:8])}"


def guarded(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from {"kvoffloadd", "scripts", "tests", *sys.stdlib_module_names}.intersection(
                imports_when_loaded(node.body)
            )


def heavy(path: Path) -> Iterator[str]:
    yield from HEAVY.intersection(imports_when_loaded(tree(path).body))


def unfinished(path: Path) -> Iterator[str]:
    marks = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|['\"`( ](/home|/root|/Users)/")
    yield from (line for line in path.read_text(encoding="utf-8").splitlines() if marks.search(line))


def pickles(path: Path) -> Iterator[str]:
    names = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    yield from names.intersection(imports_when_loaded(tree(path).body))


RULES: dict[str, tuple[Rule, list[Path]]] = {
    "files and classes stay small": (large, FILES),
    "no assert, which `python -O` strips: what must hold is checked with an explicit raise": (asserts, FILES),
    "modules say what they are": (without_docstring, FILES),
    "docstrings are sentences: none begins with a preposition": (fragments, [*FILES, *SCRIPTS, *TESTS]),
    "TYPE_CHECKING guards third parties alone: what is imported plainly can't go in a circle": (
        guarded,
        [*FILES, *SCRIPTS, *TESTS],
    ),
    "nothing heavy is imported at module level": (heavy, FILES),
    "nothing unfinished, and no private paths": (unfinished, [*FILES, *SCRIPTS]),
    "no pickle: nothing that a peer sends may become code": (pickles, FILES),
}


@pytest.mark.parametrize("rule", RULES)
def test_house_rules(rule: str) -> None:
    find, paths = RULES[rule]
    broken = {str(path.relative_to(ROOT)): found for path in paths if (found := list(find(path)))}
    assert broken == {}


@pytest.mark.parametrize("package", ["kvoffloadd", "scripts"])
def test_no_modules_import_each_other(package: str) -> None:
    """Imports in functions count, too."""
    assert shape_of(ROOT, package).circles == []


def test_one_name_is_one_class() -> None:
    """Only the two ends of the wire share names: what a peer sends or asks for, what the client makes of it, and its
    other half in the daemon.
    """
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    twice = {name: sorted(path.split("/")[0] for path in paths) for name, paths in places.items() if len(paths) > 1}
    assert twice == {name: sorted(["client", room]) for name, room in TWINS.items()}


def test_fragments_are_found(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text(
        '''"""From a status to metrics."""

class A:
    """Returns nothing."""

    def f(self):
        """Of a parser."""

    async def g(self):
        """`As`, quoted, is found, too."""

def h():
    """Often a word only begins like one: Offers, Tokens."""

def i():
    """Offers nothing."""
''',
        encoding="utf-8",
    )
    assert sorted(fragments(path)) == [
        "f: Of a parser.",
        "g: `As`, quoted, is found, too.",
        "module: From a status to metrics.",
    ]


def test_imports_when_loaded_sees_what_it_must() -> None:
    source = """
import os.path
if TYPE_CHECKING:
    import torch
else:
    import cupy
try:
    from cuda.bindings import driver
except ImportError:
    pass
class A:
    import json
    def f(self):
        import torch
"""
    assert list(imports_when_loaded(ast.parse(source).body)) == ["os", "cupy", "cuda", "json"]


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_package_loads_next_to_nothing() -> None:
    assert loaded_by("import kvoffloadd").isdisjoint(HEAVY | {"numpy", "msgspec", "asyncio", "rich"})


def test_importing_everything_loads_neither_torch_nor_cuda() -> None:
    """This excludes what subclasses an engine's classes, which only that engine imports."""
    everything = """
import importlib, pkgutil, kvoffloadd
for module in pkgutil.walk_packages(kvoffloadd.__path__, "kvoffloadd."):
    if not module.name.endswith("__main__") and not module.name.startswith("kvoffloadd.integrations."):
        importlib.import_module(module.name)
"""
    assert loaded_by(everything).isdisjoint(HEAVY)


def test_import_contracts_cover_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = next(contract for contract in settings["contracts"] if contract["type"] == "layers")
    assert layers["exhaustive"] is True
    listed = {name.strip(" ()") for layer in layers["layers"] for name in re.split(r"[|:]", layer)}
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert there - {"__init__"} <= listed
    forbidden = {tuple(c["source_modules"]) for c in settings["contracts"] if c["type"] == "forbidden"}
    assert len(forbidden) >= 5


def test_version_is_in_the_changelog_or_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{kvoffloadd.__version__}]" in text or "## [Unreleased]" in text
