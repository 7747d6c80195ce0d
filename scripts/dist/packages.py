"""Builds the wheel and the source package, and checks what is in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvoffloadd.testing.wait import HANG_S

BUILD_S, CHECK_S = 10 * HANG_S, 2 * HANG_S
OLDEST_GLIBC = (2, 17)
"""What docs/OPERATIONS.md promises."""
HELPER = "kvoffloadd/native/_native.abi3.so"

_PYTHON_SETTINGS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH", "VIRTUAL_ENV")
_WAYS_TO_PACKAGES = (
    "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_TRUSTED_HOST", "PIP_CERT",
    "PIP_CLIENT_CERT", "PIP_PROXY", "PIP_CACHE_DIR", "PIP_TIMEOUT", "PIP_RETRIES",
)  # fmt: skip
"""The variables that tell pip where its packages are and how it gets them, without which it may find none."""


def without_settings(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without settings of whoever calls, so that all get the same packages from the same tree:
    without those of kvoffloadd, those that let a Python import more than its venv has, and those that change what pip
    installs or where to.
    """
    return {
        name: value
        for name, value in variables.items()
        if name in _WAYS_TO_PACKAGES or not (name in _PYTHON_SETTINGS or name.startswith(("KVOFFLOADD_", "PIP_")))
    }


class DistError(Exception):
    """A package can't be built; the message has the output of the tool that failed."""


@dataclass(frozen=True, slots=True)
class Packages:
    """The files that users install."""

    wheel: Path
    source: Path

    @property
    def tag(self) -> str:
        """Returns Python, ABI and the oldest platform from the wheel's name, without older names for that platform."""
        python, abi, platforms = self.wheel.stem.split("-")[-3:]
        return f"{python}-{abi}-{platforms.split('.')[-1]}"


def run_tool(*command: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    """Runs a tool of this environment; its programs are found before those of the PATH. Both streams come as one.
    Raises DistError if it hangs.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        return subprocess.run(
            [sys.executable, "-m", *command], env=without_settings(os.environ) | {"PATH": path},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=limit_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DistError(f"{command[0]} hangs, after {limit_s:.0f} s") from None


def copy_tracked(root: Path, folder: Path) -> None:
    """Copies the files that git tracks, as they are now: neither builds of other versions nor stray files get into a
    package.
    """
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    if listed.returncode:
        raise DistError(f"{root} is no checkout: {os.fsdecode(listed.stderr).strip()}")
    for name in filter(None, os.fsdecode(listed.stdout).split("\0")):
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)


def build(root: Path, scratch: Path, target: Path) -> Packages:
    """Builds the source package from the checkout, the wheel from the source package, and puts both into `target`,
    instead of other versions of them.
    """
    copy_tracked(root, scratch / "tree")
    built = scratch / "built"
    _need(run_tool("build", "--no-isolation", "--outdir", str(built), str(scratch / "tree"), limit_s=BUILD_S))
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    if "-abi3-" not in wheel.name:
        raise DistError("the C helper could not be compiled: install a C compiler and Python's headers")
    # It names the oldest glibc that will do; package indexes refuse the name that setuptools gives.
    _need(run_tool("auditwheel", "repair", "--wheel-dir", str(scratch / "repaired"), str(wheel), limit_s=BUILD_S))
    (repaired,) = (scratch / "repaired").glob("*.whl")
    return Packages(*replace([repaired, source], target))


def replace(built: Sequence[Path], target: Path) -> list[Path]:
    """Puts the packages into the folder, instead of those of kvoffloadd that are there, and returns their paths."""
    target.mkdir(parents=True, exist_ok=True)
    for old in (*target.glob("kvoffloadd-*.whl"), *target.glob("kvoffloadd-*.tar.gz")):
        old.unlink()
    return [Path(shutil.copy2(package, target)) for package in built]


def _need(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise DistError(f"{done.args[2]} failed with status {done.returncode}:\n{done.stdout.strip()}")


def check_metadata(packages: Packages) -> list[str]:
    """Returns what an index would refuse."""
    done = run_tool("twine", "check", "--strict", str(packages.wheel), str(packages.source), limit_s=CHECK_S)
    return [] if done.returncode == 0 else [done.stdout.strip()]


def check_stable_abi(packages: Packages) -> list[str]:
    """Returns what in the compiled module is not of the ABI that the wheel's name promises."""
    done = run_tool("abi3audit", "--strict", "--summary", str(packages.wheel), limit_s=CHECK_S)
    return [] if done.returncode == 0 else [done.stdout.strip()]


def check_content(packages: Packages, version: str) -> list[str]:
    """Returns what is missing in the packages, and what does not belong there."""
    with zipfile.ZipFile(packages.wheel) as wheel:
        in_wheel = wheel.namelist()
    with tarfile.open(packages.source) as source:
        in_source = [name.partition("/")[2] for name in source.getnames()]
    found = [
        f"{package.name}: not of version {version}"
        for package in (packages.wheel, packages.source)
        if not package.name.startswith(f"kvoffloadd-{version}{'-' if package is packages.wheel else '.tar'}")
    ]
    matched = re.fullmatch(r"cp311-abi3-manylinux_(\d+)_(\d+)_\w+", packages.tag)
    if matched is None:
        found.append(f"wheel: not for all versions of Python and every Linux, but {packages.tag}")
    elif (int(matched[1]), int(matched[2])) > OLDEST_GLIBC:
        found.append(f"wheel: needs a newer glibc than {'.'.join(map(str, OLDEST_GLIBC))}: {packages.tag}")
    if compiled := _unlike([name for name in in_wheel if name.endswith(".so")], [HELPER]):
        found.append(f"wheel: compiled modules: {compiled}")
    folders = sorted({name.split("/")[0] for name in in_wheel})
    if extra := _unlike(folders, ["kvoffloadd", f"kvoffloadd-{version}.dist-info"]):
        found.append(f"wheel: top folders: {extra}")
    if tests := [name for name in in_source if re.match(r"(tests|scripts|docs)\b", name)]:
        found.append(f"source package: does not belong there: {', '.join(tests[:3])}")
    needed = ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "kvoffloadd/native/_native.h")
    return found + [f"source package: has no {name}" for name in needed if name not in in_source]


def _unlike(found: Sequence[str], right: Sequence[str]) -> str:
    return "" if list(found) == list(right) else f"{', '.join(found) or 'none'}, not {', '.join(right)}"
