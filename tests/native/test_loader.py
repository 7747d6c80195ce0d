"""The C code is used only if each of its functions gives the results that Python's give."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.native import loader
from kvoffloadd.native.helper import Helper
from kvoffloadd.native.loader import load
from kvoffloadd.native.selftest import is_right
from kvoffloadd.native.xxh3 import Xxh3, find_xxh3

ROOT = Path(__file__).parents[2]
MODULE = "kvoffloadd.native._native"
HASHING = ("copy_payloads", "hash_payloads")
FUNCTIONS = sorted(name for name in vars(Helper) if not name.startswith("_"))


@pytest.fixture
def helper() -> Helper:
    if loader.HELPER is None:
        pytest.skip("the C code was not compiled here")
    return loader.HELPER


@pytest.fixture
def xxh3() -> Xxh3:
    found = find_xxh3()
    if found is None:
        pytest.skip("xxhash does not export its C functions")
    return found


class Changed:
    """The helper, with one of its functions replaced."""

    def __init__(self, helper: Helper, name: str, function: Callable[..., Any] | None) -> None:
        self._helper, self._name, self._function = helper, name, function

    def __getattr__(self, name: str) -> object:
        if name != self._name:
            return getattr(self._helper, name)
        if self._function is None:
            raise AttributeError(name)
        return self._function


def test_what_was_compiled_here_is_right(helper: Helper, xxh3: Xxh3) -> None:
    assert is_right(helper, xxh3)
    assert is_right(helper, None)
    assert loader.XXH3 is not None


def test_it_has_these_functions_alone(helper: Helper) -> None:
    assert sorted(name for name in dir(helper) if not name.startswith("_")) == FUNCTIONS


def does_nothing(*_: object) -> int:
    return 0


def refuses(*_: object) -> None:
    raise ValueError("96 bytes where 72 are needed")


@pytest.mark.parametrize("other", [None, does_nothing, refuses], ids=["lacks", "does nothing", "refuses"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_with_a_function_that_is_wrong_is_not_used(
    helper: Helper, xxh3: Xxh3, name: str, other: Callable[..., Any] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: Any = Changed(helper, name, other)
    assert not is_right(changed, xxh3)
    assert is_right(changed, None) == (name in HASHING), "hashing of payloads is left out alone"
    monkeypatch.setitem(sys.modules, MODULE, changed)
    assert load() == ((changed, None) if name in HASHING else (None, None))


def last_array(arguments: tuple[Any, ...]) -> np.ndarray:
    found: np.ndarray = [one for one in arguments if isinstance(one, np.ndarray)][-1]
    return found


@pytest.mark.parametrize("name", ["copy_payloads", "hash_payloads", "hash_keys", "find_rows", "mark_hits"])
def test_each_of_its_results_counts(helper: Helper, xxh3: Xxh3, name: str) -> None:
    """One bit of one of the results is another one, each in turn."""
    right = getattr(helper, name)
    counted: list[int] = []

    def count(*given: Any) -> object:
        counted.append(len(last_array(given)))
        return right(*given)

    assert is_right(Changed(helper, name, count), xxh3)  # type: ignore[arg-type]
    for wrong in range(counted[0]):

        def change(*given: Any, wrong: int = wrong) -> object:
            result = right(*given)
            results = last_array(given)
            results[wrong] ^= results.dtype.type(1)
            return result

        assert not is_right(Changed(helper, name, change), xxh3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["copy_runs", "rows_fit", "remove_rows"])
def test_each_returned_value_counts(helper: Helper, name: str) -> None:
    right = getattr(helper, name)
    assert not is_right(Changed(helper, name, lambda *given: right(*given) ^ 1), None)  # type: ignore[arg-type]


def test_without_it_nothing_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    assert load() == (None, None)


def test_xxhash_that_exports_nothing_costs_the_hashing_alone(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_xxh3", lambda: None)
    assert load() == (helper, None)


def test_a_file_for_another_machine_is_not_used(tmp_path: Path) -> None:
    place = tmp_path / "kvoffloadd"
    shutil.copytree(ROOT / "kvoffloadd", place, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (place / "native" / "_native.abi3.so").write_bytes(b"\x7fELF" + bytes(4096))
    code = "from kvoffloadd.native import loader; print(loader.__file__, loader.HELPER)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert done.stdout.split() == [str(place / "native" / "loader.py"), "None"]


@pytest.mark.slow
def test_its_sources_compile_without_a_warning(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if compiler is None or not header.exists():
        pytest.skip("no C compiler, or not Python's headers")
    sources = map(str, sorted((ROOT / "kvoffloadd" / "native").glob("*.c")))
    command = [compiler, "-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{header.parent}", *sources]
    subprocess.run([*command, "-o", str(tmp_path / "_native.abi3.so")], check=True, timeout=120)
