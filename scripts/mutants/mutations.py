"""Small changes of a program that a test should notice: those written down in a file, and those found in its syntax."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OTHER: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}  # fmt: skip
_TOLD = {"debug", "info", "warning", "error", "critical", "exception"}
"""Calls that only write to the log: no test need notice that they are gone."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program that differs in one place. `source` is the changed file's text; `tests` should fail with it."""

    name: str
    file: str
    source: str
    tests: tuple[str, ...]


def written(path: Path, root: Path) -> list[Mutant]:
    """The mutants of a TOML file: `[[mutant]]` with `name`, `file`, `replace`, `by`, `tests`.

    Raises:
        ValueError: a text to be replaced is not in its file exactly once.
    """
    mutants = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
        name, file, old, new = (entry[key] for key in ("name", "file", "replace", "by"))
        source = (root / file).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise ValueError(f"{path.name}: {name}: its text is {source.count(old)} times in {file}, not once")
        mutants.append(Mutant(name, file, source.replace(old, new), tuple(entry["tests"])))
    return mutants


def found(room: str, root: Path, tests: tuple[str, ...]) -> Iterator[Mutant]:
    """Every mutant of the files below a folder: one comparison, operator, condition, number or call changed."""
    for path in sorted((root / room).rglob("*.py")):
        file = str(path.relative_to(root))
        text = path.read_text(encoding="utf-8")
        for place in range(sum(1 for _ in _changes(ast.parse(text)))):
            tree = ast.parse(text)
            for number, (node, what, change) in enumerate(_changes(tree)):
                if number == place:
                    change()
                    yield Mutant(f"{file}:{node.lineno} {what}", file, ast.unparse(tree), tests)
                    break


def _changes(tree: ast.Module) -> Iterator[tuple[Any, str, Any]]:
    """(node, in words, function that makes the change) for every place of a tree, in a fixed order."""
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            children = value if isinstance(value, list) else [value]
            for at, child in enumerate(children):
                change = _change(child, parent) if isinstance(child, ast.AST) and not _annotates(name) else None
                if change is not None:
                    what, new = change
                    yield child, what, _put(parent, name, at if isinstance(value, list) else None, new)


def _annotates(field: str) -> bool:
    return field in ("annotation", "returns", "decorator_list")


def _put(parent: ast.AST, name: str, at: int | None, new: ast.AST) -> Any:
    def change() -> None:
        if at is None:
            setattr(parent, name, new)
        else:
            getattr(parent, name)[at] = new

    return change


def _change(node: ast.AST, parent: ast.AST) -> tuple[str, ast.AST] | None:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=right) if type(op) in _OPPOSITE:
            other = _OPPOSITE[type(op)]
            return f"{type(op).__name__} is {other.__name__}", _at(node, ast.Compare(left, [other()], right))
        case ast.BoolOp(op=op, values=values):
            swapped = ast.Or() if isinstance(op, ast.And) else ast.And()
            return f"{type(op).__name__} is {type(swapped).__name__}", _at(node, ast.BoolOp(swapped, values))
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return "a negation is gone", operand
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OTHER:
            operator = _OTHER[type(op)]
            return f"{type(op).__name__} is {operator.__name__}", _at(node, ast.BinOp(left, operator(), right))
        # Elsewhere a number is mostly a size or a start, and another one would do as well.
        case ast.Constant(value=int() as value) if isinstance(parent, (ast.Compare, ast.BinOp)) and value < 1000:
            return f"{value} is {value + 1}", _at(node, ast.Constant(value + 1))
        case ast.Expr(value=ast.Call(func=function)) if getattr(function, "attr", "") not in _TOLD:
            return f"no call of {ast.unparse(function)}", _at(node, ast.Pass())
        case ast.If(test=test, body=[ast.Raise()]):
            return f"no error if {ast.unparse(test)}", _at(node, ast.Pass())
    return None


def _at(old: ast.AST, new: ast.AST) -> ast.AST:
    return ast.fix_missing_locations(ast.copy_location(new, old))
