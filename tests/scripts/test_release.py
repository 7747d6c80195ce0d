"""`scripts release` in a git repository of its own: what it changes, and what keeps it from changing anything."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kvoffloadd.testing.process import ROOT
from scripts.dist import release as module
from scripts.dist.release import ReleaseError, make, undo

OLD = """# Changelog

## [Unreleased]

### Added

- A wheel.

## [0.1.0] - 2026-01-02

- The first.
"""
VERSION_FILE = Path("kvoffloadd/__init__.py")
NEEDED = (
    "scripts/__init__.py", "scripts/__main__.py", "scripts/dist", "kvoffloadd/testing", "kvoffloadd/errors.py",
    "kvoffloadd/units.py",
)  # fmt: skip


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Clean, with one commit, and with what the command needs."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in NEEDED:
        (root / name).parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, root / name)
    (root / VERSION_FILE).write_text('"""A package."""\n\n__version__ = "0.1.0"\n')
    (root / "CHANGELOG.md").write_text(OLD)
    (root / ".gitignore").write_text("__pycache__/\n")
    git(root, "init", "--quiet", "--initial-branch=main")
    git(root, "config", "user.name", "a")
    git(root, "config", "user.email", "a@example.org")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "--message=All")
    return root


def release(root: Path, version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "scripts"), "release", version]
    variables = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(command, cwd=root.parent, env=variables, capture_output=True, text=True, check=False)


def state(root: Path) -> list[str]:
    """Everything that a release changes."""
    return [git(root, "log", "--format=%H"), git(root, "tag"), git(root, "status", "--porcelain")]


def test_a_release(checkout: Path) -> None:
    before = f"{datetime.now(UTC):%Y-%m-%d}"
    done = release(checkout, "0.2.0")
    assert done.returncode == 0, done.stderr
    changelog = (checkout / "CHANGELOG.md").read_text()
    (date,) = re.findall(r"^## \[0\.2\.0\] - (.*)$", changelog, re.MULTILINE)
    assert date in (before, f"{datetime.now(UTC):%Y-%m-%d}")
    assert changelog == OLD.replace("## [Unreleased]\n", f"## [Unreleased]\n\n## [0.2.0] - {date}\n")
    assert (checkout / VERSION_FILE).read_text() == '"""A package."""\n\n__version__ = "0.2.0"\n'
    assert git(checkout, "status", "--porcelain") == ""
    assert git(checkout, "log", "-1", "--format=%s") == "Release 0.2.0\n"
    assert git(checkout, "diff", "--name-only", "HEAD~1").splitlines() == ["CHANGELOG.md", str(VERSION_FILE)]
    assert git(checkout, "rev-parse", "v0.2.0^{commit}") == git(checkout, "rev-parse", "HEAD")


def test_the_tag_has_the_notes(checkout: Path) -> None:
    """The notes keep their headings, which git takes for comments."""
    done = release(checkout, "0.2.0")
    notes = "### Added\n\n- A wheel.\n"
    assert git(checkout, "cat-file", "-t", "v0.2.0") == "tag\n"
    assert git(checkout, "tag", "--list", "--format=%(contents:body)", "v0.2.0").strip() == notes.strip()
    assert done.stdout.startswith(notes)


def test_the_first_release_keeps_the_version(checkout: Path) -> None:
    (checkout / "CHANGELOG.md").write_text(OLD.partition("## [0.1.0]")[0])
    git(checkout, "commit", "--quiet", "--all", "--message=No section")
    assert release(checkout, "0.1.0").returncode == 0
    assert git(checkout, "tag") == "v0.1.0\n"


def dirty(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(OLD + "\n")


def stray(root: Path) -> None:
    (root / "stray").touch()


def tagged(root: Path) -> None:
    git(root, "tag", "v0.2.0")


def detached(root: Path) -> None:
    git(root, "switch", "--quiet", "--detach")


def empty(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(OLD.replace("### Added\n\n- A wheel.\n", "### Added\n"))
    git(root, "commit", "--quiet", "--all", "--message=Empty")


def no_section(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(OLD.replace("[Unreleased]", "[Next]"))
    git(root, "commit", "--quiet", "--all", "--message=Other")


def has_section(root: Path) -> None:
    (root / "CHANGELOG.md").write_text(OLD.replace("[0.1.0]", "[0.2.0]"))
    git(root, "commit", "--quiet", "--all", "--message=Ahead")


def newer(root: Path) -> None:
    (root / VERSION_FILE).write_text('__version__ = "0.10.0"\n')
    git(root, "commit", "--quiet", "--all", "--message=Newer")


def refusing_hook(root: Path) -> None:
    hook = root / ".git/hooks/pre-commit"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\necho not today >&2\nexit 1\n")
    hook.chmod(0o755)


def locked_tags(root: Path) -> None:
    """The commit succeeds, and then the tag can't be made."""
    place = root / ".git/refs/tags/v0.2.0.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (dirty, "the checkout is not clean; commit or remove:\n M CHANGELOG.md"),
        (stray, "?? stray"),
        (tagged, "the tag v0.2.0 exists already"),
        (detached, "no branch is checked out"),
        (empty, 'has no entries below "## [Unreleased]"'),
        (no_section, 'has no section "## [Unreleased]"'),
        (has_section, "has a section for 0.2.0 already"),
        (newer, "0.2.0 is older than 0.10.0"),
        (refusing_hook, "git commit failed: not today"),
        (locked_tags, "git tag failed"),
    ],
)
def test_what_keeps_it_from_changing_anything(checkout: Path, prepare: object, told: str) -> None:
    assert callable(prepare)
    prepare(checkout)
    before = state(checkout)
    done = release(checkout, "0.2.0")
    assert (done.returncode, done.stdout) == (1, "")
    assert told in done.stderr
    assert state(checkout) == before


def test_what_others_write_meanwhile_stays(checkout: Path) -> None:
    """The hook that refuses the commit has changed another file, as a formatter does."""
    refusing_hook(checkout)
    hook = checkout / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho more >> CONTRIBUTING\nexit 1\n")
    (checkout / "CONTRIBUTING").write_text("some\n")
    git(checkout, "add", "CONTRIBUTING")
    git(checkout, "commit", "--quiet", "--no-verify", "--message=More")
    assert release(checkout, "0.2.0").returncode == 1
    assert (checkout / "CONTRIBUTING").read_text() == "some\nmore\n"
    assert state(checkout)[1:] == ["", " M CONTRIBUTING\n"]


def interrupting_hook(root: Path) -> None:
    """Once there is a tag, git's parent is interrupted, before git returns to it. Other changes of refs pass."""
    hook = root / ".git/hooks/reference-transaction"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(
        "#!/bin/sh\n"
        f'tagged="{root}/.git/tagged"\n'
        '[ "$1" = committed ] && [ ! -e "$tagged" ] && grep -q refs/tags/ || exit 0\n'
        'git tag > "$tagged"\n'
        'kill -INT "$(cut -d " " -f 4 "/proc/$PPID/stat")"\n'
        'while kill -0 "$PPID" 2> /dev/null; do sleep 0.05; done\n'
    )
    hook.chmod(0o755)


def test_a_release_that_is_interrupted_after_its_tag_is_taken_back(checkout: Path) -> None:
    interrupting_hook(checkout)
    before = state(checkout)
    done = release(checkout, "0.2.0")
    assert done.returncode == -signal.SIGINT
    assert (checkout / ".git/tagged").read_text() == "v0.2.0\n"
    assert state(checkout) == before


def hanging_hook(root: Path) -> None:
    refusing_hook(root)
    (root / ".git/hooks/pre-commit").write_text("#!/bin/sh\nexec sleep 600\n")


@pytest.mark.slow
def test_a_git_that_hangs_is_ended_and_leaves_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a password, say. It holds locks, which it removes if it is asked to end."""
    hanging_hook(checkout)
    before = state(checkout)
    monkeypatch.setattr(module, "GIT_S", 10.0)
    with pytest.raises(ReleaseError, match="git commit hangs, after 10 s; does it wait for a password"):
        make(checkout, "0.2.0", "2026-01-03")
    assert state(checkout) == before


def test_what_can_not_be_taken_back_is_told(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So is the reason of the failure, which is what somebody has to mend first."""
    refusing_hook(checkout)

    def undo_beside_another_git(root: Path, before: str, version: str) -> None:
        (root / ".git/index.lock").touch()
        undo(root, before, version)

    monkeypatch.setattr(module, "undo", undo_beside_another_git)
    with pytest.raises(ReleaseError) as caught:
        make(checkout, "0.2.0", "2026-01-03")
    assert str(caught.value).startswith("git commit failed: not today\nIt could not be taken back: git re")


@pytest.mark.parametrize("version", ["", "1", "1.2", "v1.2.3", "1.2.3rc1", "01.2.3", "1.2.3.4", "1.2.٣"])
def test_what_is_no_version(checkout: Path, version: str) -> None:
    before = state(checkout)
    done = release(checkout, version)
    assert done.returncode == 2
    assert "is not of the form 1.2.3" in done.stderr
    assert state(checkout) == before
