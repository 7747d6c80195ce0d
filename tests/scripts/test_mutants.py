"""`scripts mutants`: the mutants that are written down can be made, and those of a program differ in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvoffloadd.testing.process import ROOT
from scripts.mutants.mutations import found, written

PROGRAM = """
def clipped(value: int, most: int) -> int:
    if value < 0 and not most:
        raise ValueError(value)
    return min(value + 1, most)
"""


def test_what_is_written_down_can_be_made() -> None:
    mutants = written(ROOT / "tests/mutants.toml", ROOT)
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 20
    for mutant in mutants:
        ast.parse(mutant.source)
        assert mutant.source != (ROOT / mutant.file).read_text(encoding="utf-8")
        assert all((ROOT / test).exists() for test in mutant.tests), mutant.name


def test_a_text_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("a = 1\na = 1\n", encoding="utf-8")
    listed = tmp_path / "mutants.toml"
    for text, times in (("a = 1", 2), ("b = 1", 0)):
        listed.write_text(
            f'[[mutant]]\nname = "m"\nfile = "program.py"\nreplace = "{text}"\nby = ""\ntests = []\n', encoding="utf-8"
        )
        with pytest.raises(ValueError, match=f"m: its text is {times} times in program.py"):
            written(listed, tmp_path)


def test_mutants_of_a_program(tmp_path: Path) -> None:
    """Each differs in one place, and can be run."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room/program.py").write_text(PROGRAM, encoding="utf-8")
    mutants = list(found("room", tmp_path, ("tests",)))
    assert [mutant.name.split(" ", 1)[1] for mutant in mutants] == [
        "no error if value < 0 and (not most)", "And is Or", "Lt is LtE", "a negation is gone", "Add is Sub", "0 is 1",
        "1 is 2",
    ]  # fmt: skip
    right = ast.unparse(ast.parse(PROGRAM))
    for mutant in mutants:
        compile(mutant.source, mutant.file, "exec")
        assert mutant.source != right
    assert len({mutant.source for mutant in mutants}) == len(mutants)
