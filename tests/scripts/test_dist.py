"""`scripts dist`: which Pythons it uses, what it finds wrong in packages, and that each step of a trial can fail."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from argparse import Namespace
from pathlib import Path

import pytest

from kvoffloadd import __version__
from kvoffloadd.testing.process import ROOT
from kvoffloadd.testing.wait import HANG_S
from scripts.dist.__main__ import Report, named, pythons, version_of
from scripts.dist.interpreters import Interpreter, Version, at_hand, promised_versions
from scripts.dist.packages import HELPER, DistError, Packages, check_content, copy_tracked, replace, without_settings
from scripts.dist.trial import KINDS, Outcome, try_out

OLDEST = Version(3, 11)
WHEEL = "kvoffloadd-1.2.3-cp311-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
SOURCE = "kvoffloadd-1.2.3.tar.gz"
IN_WHEEL = ("kvoffloadd/__init__.py", HELPER, "kvoffloadd-1.2.3.dist-info/METADATA")
IN_SOURCE = (
    "LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "setup.py", "kvoffloadd/native/_native.h",
)  # fmt: skip


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def answers(path: Path, answer: str, status: int = 0) -> Path:
    """An interpreter that answers this, whatever it is given."""
    return program(path, f"#!/bin/sh\necho '{answer}'\nexit {status}\n")


# --- interpreters ----------------------------------------------------------------------------------------------------


def test_one_interpreter_for_each_version(tmp_path: Path) -> None:
    """The PATH comes before pyenv, and of two the one that makes venvs."""
    first, second, pyenv = tmp_path / "first", tmp_path / "second", tmp_path / "home/.pyenv/versions"
    system = answers(first / "python3.11", "[3, 11, 2, true, false]")
    able = answers(second / "python3.11", "[3, 11, 9, true, true]")
    later = answers(second / "python3.12", "[3, 12, 1, true, true]")
    unable = answers(second / "python3", "[3, 13, 5, true, false]")
    answers(pyenv / "3.12.8/bin/python3", "[3, 12, 8, true, true]")
    newest = answers(pyenv / "3.14.0/bin/python3", "[3, 14, 0, true, true]")
    found = at_hand({"PATH": f"{first}:{second}", "HOME": str(tmp_path / "home")}, OLDEST)
    assert system not in {one.path for one in found.values()}
    assert list(found.values()) == [
        Interpreter(able, Version(3, 11), "3.11.9", True),
        Interpreter(later, Version(3, 12), "3.12.1", True),
        Interpreter(unable, Version(3, 13), "3.13.5", False),
        Interpreter(newest, Version(3, 14), "3.14.0", True),
    ]


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("[3, 10, 13, true, true]", 0),  # too old
        ("[3, 13, 0, false, true]", 0),  # PyPy, or without the GIL
        ("pyenv: python3.12: command not found", 127),  # a shim
        ("Python 3.12.1", 0),
    ],
)
def test_what_is_no_interpreter_for_the_wheel(tmp_path: Path, answer: str, status: int) -> None:
    answers(tmp_path / "python3.12", answer, status)
    assert at_hand({"PATH": str(tmp_path), "HOME": str(tmp_path)}, OLDEST) == {}


def test_other_programs_are_not_run(tmp_path: Path) -> None:
    for name in ("python3-config", "python3.12-dbg", "python3.13t", "python2.7", "pythonw"):
        answers(tmp_path / name, "[3, 12, 0, true, true]")
    answers(tmp_path / "python3.12", "[3, 12, 0, true, true]").chmod(0o644)
    assert at_hand({"PATH": str(tmp_path), "HOME": str(tmp_path)}, OLDEST) == {}


def test_this_interpreter_is_found() -> None:
    version = Version(*sys.version_info[:2])
    environment = {"PATH": str(Path(sys.executable).parent), "HOME": "/nowhere"}
    assert at_hand(environment, version)[version].release == sys.version.split()[0]


def test_the_newest_of_pyenv_comes_first(tmp_path: Path) -> None:
    """Its numbers are compared, not their text."""
    versions = tmp_path / ".pyenv/versions"
    for release in ("3.12.9", "3.12.10", "3.9.30"):
        answers(versions / release / "bin/python3", f"[{release.replace('.', ', ')}, true, true]")
    (found,) = at_hand({"HOME": str(tmp_path)}, OLDEST).values()
    assert found.release == "3.12.10"


def test_an_interpreter_that_is_named_is_tried_or_reported(tmp_path: Path) -> None:
    """Nobody takes its absence from the table for a success."""
    assert named(answers(tmp_path / "mine", "[3, 12, 1, true, true]")).release == "3.12.1"
    unfit = answers(tmp_path / "pypy", "[3, 12, 0, false, true]"), answers(tmp_path / "old", "[3, 10, 0, true, true]")
    for path in (tmp_path / "missing", *unfit):
        with pytest.raises(DistError, match=f"--python {path}: does not run"):
            named(path)


def test_all_that_are_named_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also two of one version, in place of the one that is at hand."""
    first = answers(tmp_path / "first", "[3, 12, 1, true, true]")
    second = answers(tmp_path / "second", "[3, 12, 2, true, true]")
    unable = answers(tmp_path / "third", "[3, 13, 1, true, false]")
    answers(tmp_path / "bin/python3.12", "[3, 12, 9, true, true]")
    at_hand_too = answers(tmp_path / "bin/python3.11", "[3, 11, 9, true, true]")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    used, reasons = pythons(Namespace(quick=False, python=[first, second, unable]))
    assert [one.path for one in used] == [at_hand_too, first, second]
    assert reasons["3.13.1"] == "has no module venv or ensurepip"
    assert {"3.11", "3.12", "3.13"}.isdisjoint(reasons)


def test_quick_takes_no_interpreter() -> None:
    command = [sys.executable, "-m", "scripts", "dist", "--quick", "--python", sys.executable]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert done.returncode == 2
    assert "--python can't be used with it" in done.stderr


def test_promised_versions_begin_with_the_oldest_that_is_accepted() -> None:
    promised = promised_versions(ROOT / "pyproject.toml")
    assert f'requires-python = ">={promised[0]}"' in (ROOT / "pyproject.toml").read_text()
    assert promised == [Version(3, minor) for minor in range(promised[0].minor, promised[-1].minor + 1)]


# --- packages --------------------------------------------------------------------------------------------------------


def git(root: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=root, check=True)


def test_only_what_git_tracks_is_packed_and_as_it_is_now(tmp_path: Path) -> None:
    root, copy = tmp_path / "root", tmp_path / "copy"
    for name in ("kept", "changed", "room/removed", "room/größe"):
        program(root / name, "old")
    git(tmp_path, "init", "--quiet", str(root))
    git(root, "add", ".")
    (root / "changed").write_text("new")
    (root / "room/removed").unlink()
    (root / "stray").write_text("of an earlier build")
    copy.mkdir()
    copy_tracked(root, copy)
    files = {str(path.relative_to(copy)): path.read_text() for path in copy.rglob("*") if path.is_file()}
    assert files == {"kept": "old", "changed": "new", "room/größe": "old"}


def test_without_git_nothing_is_packed(tmp_path: Path) -> None:
    with pytest.raises(DistError, match="is no checkout"):
        copy_tracked(tmp_path, tmp_path / "copy")


def test_older_packages_go_and_other_files_stay(tmp_path: Path) -> None:
    target, new = tmp_path / "dist", tmp_path / "new"
    for name in (WHEEL.replace("1.2.3", "1.2.2"), SOURCE.replace("1.2.3", "1.2.2"), "other-1.0.tar.gz", "notes"):
        program(target / name, "old")
    replace([program(new / WHEEL, "new"), program(new / SOURCE, "new")], target)
    assert sorted(path.name for path in target.iterdir()) == sorted([WHEEL, SOURCE, "other-1.0.tar.gz", "notes"])


def test_settings_of_whoever_calls_do_not_count() -> None:
    """Where pip finds packages is kept: without that, nothing could be installed."""
    ways = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_PROXY", "PIP_CACHE_DIR")
    kept = dict.fromkeys((*ways, "PATH", "PYENV_ROOT"), "1")
    settings = ("PYTHONPATH", "VIRTUAL_ENV", "KVOFFLOADD_SOCKET", "KVOFFLOADD_DAEMON_UID")
    of_pip = ("PIP_CONSTRAINT", "PIP_NO_DEPS", "PIP_NO_BINARY", "PIP_TARGET", "PIP_PRE", "PIP_DRY_RUN", "PIP_REPORT")
    assert without_settings(kept | dict.fromkeys((*settings, *of_pip, "PIP_INDEX_URL_2"), "1")) == kept


def test_the_version_is_of_the_package() -> None:
    assert version_of(ROOT) == __version__


def packages(
    folder: Path, *, wheel: str = WHEEL, in_wheel: tuple[str, ...] = IN_WHEEL, in_source: tuple[str, ...] = IN_SOURCE
) -> Packages:
    with zipfile.ZipFile(folder / wheel, "w") as archive:
        for name in in_wheel:
            archive.writestr(name, "")
    with tarfile.open(folder / SOURCE, "w:gz") as source:
        for name in in_source:
            source.addfile(tarfile.TarInfo(f"kvoffloadd-1.2.3/{name}"), io.BytesIO())
    return Packages(folder / wheel, folder / SOURCE)


def test_good_content(tmp_path: Path) -> None:
    good = packages(tmp_path)
    assert good.tag == "cp311-abi3-manylinux_2_17_x86_64"
    assert check_content(good, "1.2.3") == []


@pytest.mark.parametrize(
    ("wheel", "in_wheel", "in_source", "told"),
    [
        (WHEEL, (IN_WHEEL[0], IN_WHEEL[2]), IN_SOURCE, "compiled modules: none"),
        (WHEEL, (*IN_WHEEL, "kvoffloadd/native/_native.cpython-311.so"), IN_SOURCE, "compiled modules"),
        (WHEEL, (*IN_WHEEL, "tests/test_a.py"), IN_SOURCE, "top folders"),
        (WHEEL, IN_WHEEL, (*IN_SOURCE, "tests/test_a.py"), "does not belong there: tests/test_a.py"),
        (WHEEL, IN_WHEEL, IN_SOURCE[1:], "has no LICENSE"),
        ("kvoffloadd-1.2.3-cp311-abi3-linux_x86_64.whl", IN_WHEEL, IN_SOURCE, "cp311-abi3-linux_x86_64"),
        (WHEEL.replace("2_17", "2_34"), IN_WHEEL, IN_SOURCE, "needs a newer glibc than 2.17"),
        ("kvoffloadd-1.2.3-py3-none-any.whl", IN_WHEEL, IN_SOURCE, "py3-none-any"),
        (WHEEL.replace("1.2.3", "1.2.2"), IN_WHEEL, IN_SOURCE, "not of version 1.2.3"),
    ],
)
def test_wrong_content(
    tmp_path: Path, wheel: str, in_wheel: tuple[str, ...], in_source: tuple[str, ...], told: str
) -> None:
    found = check_content(packages(tmp_path, wheel=wheel, in_wheel=in_wheel, in_source=in_source), "1.2.3")
    assert len(found) == 1
    assert told in found[0]


def built(folder: Path, compiler: str) -> Path:
    """The wheel that a checkout gives in which an earlier version was built."""
    pytest.importorskip("setuptools", reason="needs setuptools")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    tree, out = folder / "tree", folder / "out"
    shutil.copytree(ROOT / "kvoffloadd", tree / "kvoffloadd", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree)
    platform = f"{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
    program(tree / "build" / f"lib.{platform}" / "kvoffloadd/gone.py", "")
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "bdist_wheel", "--dist-dir", str(out)],
        cwd=tree, env={**os.environ, "CC": compiler}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = out.iterdir()
    return wheel


@pytest.mark.slow
@pytest.mark.parametrize(("compiler", "tag"), [("cc", "cp311-abi3-linux"), ("false", "py3-none-any")])
def test_a_wheel_is_named_after_what_is_in_it(tmp_path: Path, compiler: str, tag: str) -> None:
    """One without the helper is of pure Python, and is not called otherwise. What is gone from the sources is gone."""
    wheel = built(tmp_path, compiler)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/WHEEL")]
    assert wheel.name.split("-", 2)[2].startswith(tag)
    assert (HELPER in names) == (compiler == "cc")
    assert f"Tag: {tag}" in about
    assert f"Root-Is-Purelib: {str(compiler != 'cc').lower()}" in about
    assert "kvoffloadd/demo/main.py" in names
    assert "kvoffloadd/gone.py" not in names


# --- a trial ---------------------------------------------------------------------------------------------------------

FAKE_PYTHON = f"""#!{sys.executable}
import os, pathlib, shutil, sys
fault, words = os.environ["FAULT"], sys.argv[1:]
if "venv" in words:
    here = pathlib.Path(words[-1], "bin")
    here.mkdir(parents=True)
    shutil.copy2(__file__, here / "python")
    shutil.copy2(pathlib.Path(__file__).with_name("kvoffloadd"), here)
elif "pip" in words:
    print(*words)
    sys.exit(fault == "install")
else:
    print("/elsewhere/loader.py" if fault == "place" else os.path.abspath("venv/it.py"), fault != "helper")
"""
FAKE_KVOFFLOADD = f"""#!{sys.executable}
import json, os, pathlib, signal, sys, time
fault, command = os.environ["FAULT"], sys.argv[1]
if command == "--version":
    print("kvoffloadd 1.2.2" if fault == "version" else "kvoffloadd 1.2.3")
elif command in ("man", "completion"):
    print("" if fault == sys.argv[-1] else "a page")
elif command == "demo":
    sys.exit(fault == "demo")
elif command == "status":
    if fault == "status":
        sys.exit("refused")
    print(json.dumps({{"pid": int(pathlib.Path("pid").read_text()) + (fault == "pid")}}))
else:
    if fault == "start":
        sys.exit("no memory")
    signal.signal(signal.SIGTERM, lambda *_: os._exit(fault == "stop"))
    pathlib.Path("pid").write_text(str(os.getpid()))
    print("serving at", sys.argv[-1], flush=True)
    time.sleep(600)
"""


@pytest.fixture
def fake(tmp_path: Path) -> Interpreter:
    """Makes venvs whose commands do what the variable FAULT says."""
    program(tmp_path / "bin/kvoffloadd", FAKE_KVOFFLOADD)
    return Interpreter(program(tmp_path / "bin/python", FAKE_PYTHON), Version(3, 11), "3.11.7", True)


def end_of_trial(fake: Interpreter, fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    monkeypatch.setenv("FAULT", fault)
    return try_out(fake, KINDS[0], folder / WHEEL, "1.2.3", None, folder).problem


def test_a_trial_without_fault(fake: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_of_trial(fake, "", tmp_path / "trial", monkeypatch) == ""


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("install", "pip install: status 1"),
        ("place", "import: not from the venv"),
        ("helper", "the C helper is missing"),
        ("version", "--version: 'kvoffloadd 1.2.2', not 1.2.3"),
        ("man", "man: prints nothing"),
        ("fish", "completion fish: prints nothing"),
        ("demo", "demo: status 1"),
        ("start", "no memory"),
        ("status", "refused"),
        ("pid", "status: of process"),
        ("stop", "serve: ended with 1"),
    ],
)
def test_each_step_can_fail(
    fake: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, told: str
) -> None:
    assert told in end_of_trial(fake, fault, tmp_path / "trial", monkeypatch)


def test_a_helper_without_a_compiler_is_a_failure(
    fake: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (without,) = [kind for kind in KINDS if kind.variables == {"CC": "false"}]
    monkeypatch.setenv("FAULT", "")
    (tmp_path / "trial").mkdir()
    outcome = try_out(fake, without, tmp_path / SOURCE, "1.2.3", None, tmp_path / "trial")
    assert outcome.problem == "the C helper is there without a compiler"


# --- the report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "problems", "good"),
    [
        ({"metadata": []}, [""], True),
        ({"metadata": ["no description"]}, [""], False),
        ({"metadata": []}, ["", "demo: status 1"], False),
        ({"metadata": []}, [], False),  # nothing was tried
    ],
)
def test_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], findings: dict[str, list[str]], problems: list[str], good: bool
) -> None:
    python = Interpreter(Path("python3"), OLDEST, "3.11.7", True)
    outcomes = [Outcome(python, KINDS[0], 1.0, problem) for problem in problems]
    report = Report("1.2.3", packages(tmp_path), findings, outcomes, {"3.14": "not at hand"})
    assert report.is_good is report.as_json()["good"] is good
    report.print()
    shown = capsys.readouterr().out
    assert "Python 3.14" in shown and "not at hand" in shown
    for problem in (*findings["metadata"], *filter(None, problems)):
        assert problem in shown
