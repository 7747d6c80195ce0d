"""Finds the versions of Python on this machine: those on the PATH, and those that pyenv has installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROBE_S = 60.0
_CLASSIFIER = re.compile(r"Programming Language :: Python :: (\d+)\.(\d+)")
_PROBE = """
import importlib.util, json, sys, sysconfig
can = all(importlib.util.find_spec(name) for name in ("venv", "ensurepip"))
plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps([*sys.version_info[:3], plain, can]))
"""


class Version(NamedTuple):
    """A minor version of Python."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython with the GIL. One without the modules `venv` and `ensurepip` can't make a bare venv."""

    path: Path
    version: Version
    release: str
    makes_venvs: bool


def promised_versions(project: Path) -> list[Version]:
    """Returns the versions that the classifiers of pyproject.toml name, in order."""
    settings = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    matches = (_CLASSIFIER.fullmatch(text) for text in settings["classifiers"])
    return sorted(Version(int(match[1]), int(match[2])) for match in matches if match)


def candidates(environment: Mapping[str, str]) -> list[Path]:
    """Returns what may be an interpreter, without running it. The PATH comes first, then pyenv, the newest first."""
    folders = [Path(folder) for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    on_path = [
        path
        for folder in folders
        for path in sorted(folder.glob("python3*"))
        if re.fullmatch(r"python3(\.\d+)?", path.name) and os.access(path, os.X_OK)
    ]
    root = Path(environment.get("PYENV_ROOT") or Path(environment.get("HOME", "/"), ".pyenv"))
    return [*on_path, *sorted(root.glob("versions/*/bin/python3"), key=_numbers, reverse=True)]


def _numbers(path: Path) -> list[int]:
    """Returns the numbers in the path, by which 3.11.10 comes after 3.11.9."""
    return [int(number) for number in re.findall(r"\d+", str(path))]


def probe(path: Path) -> Interpreter | None:
    """Runs it. None: it does not run, such as a shim of pyenv for a version that is not chosen, or it is of a kind for
    which the wheel is not made.
    """
    try:
        done = subprocess.run(
            [str(path), "-I", "-c", _PROBE], capture_output=True, text=True, check=True, timeout=PROBE_S
        )
        major, minor, micro, plain, makes_venvs = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Interpreter(path, Version(major, minor), f"{major}.{minor}.{micro}", makes_venvs) if plain else None


def choose(found: Iterable[Interpreter], oldest: Version) -> dict[Version, Interpreter]:
    """Returns one interpreter for each version from `oldest` on: the first that makes venvs, else the first."""
    chosen: dict[Version, Interpreter] = {}
    for one in found:
        present = chosen.get(one.version)
        if one.version >= oldest and (present is None or (one.makes_venvs and not present.makes_venvs)):
            chosen[one.version] = one
    return dict(sorted(chosen.items()))


def at_hand(environment: Mapping[str, str], oldest: Version) -> dict[Version, Interpreter]:
    """Returns the interpreters of this machine, one for each version."""
    paths = dict.fromkeys(candidates(environment))
    return choose((found for path in paths if (found := probe(path))), oldest)
