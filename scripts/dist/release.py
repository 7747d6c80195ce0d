"""Make a release of this checkout: set the version, close the changelog's section, commit, tag. Nothing is pushed.

Takes a clean checkout with entries below "Unreleased" in CHANGELOG.md. The tag is annotated with these entries, which
are the release notes. Exit status 0, 1 if the checkout is not ready for this release, 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kvoffloadd.testing.program import EXIT_BAD

ROOT = Path(__file__).resolve().parents[2]
GIT_S = 120.0
VERSION_FILE, CHANGELOG = Path("kvoffloadd/__init__.py"), Path("CHANGELOG.md")
UNRELEASED = "## [Unreleased]"
ASSIGNMENT = re.compile(r'^__version__ = "(.+)"$', re.MULTILINE)


class ReleaseError(Exception):
    """The release can't be made; the message says what to do. Nothing has changed, unless it says so."""


@dataclass(frozen=True, slots=True)
class Release:
    """The version, and the texts of both files as they become."""

    version: str
    notes: str
    version_file: str
    changelog: str


def git(root: Path, *words: str, text: str | None = None) -> str:
    """Returns git's standard output. Raises ReleaseError."""
    pipe = subprocess.PIPE
    with subprocess.Popen(["git", *words], cwd=root, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as running:
        try:
            out, errors = running.communicate(text, timeout=GIT_S)
        except BaseException as error:  # also an interrupt: nothing is taken back beside a git that runs
            running.terminate()  # then it removes its locks
            with suppress(subprocess.TimeoutExpired):
                running.wait(GIT_S)
            running.kill()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise ReleaseError(f"git {words[0]} hangs, after {GIT_S:.0f} s; does it wait for a password?") from None
    if running.returncode:
        raise ReleaseError(f"git {words[0]} failed: {(errors or out).strip()}")
    return out


def numbers(version: str) -> tuple[int, ...]:
    """Returns the parts of a version, in order."""
    return tuple(map(int, version.split(".")))


def plan(version: str, date: str, version_file: str, changelog: str) -> Release:
    """Returns what a release on this date changes. Raises ReleaseError."""
    present = ASSIGNMENT.search(version_file)
    if present is None:
        raise ReleaseError(f"{VERSION_FILE} has no __version__")
    if numbers(version) < numbers(present[1]):
        raise ReleaseError(f"{version} is older than {present[1]}, the version of this checkout")
    if f"## [{version}]" in changelog:
        raise ReleaseError(f"{CHANGELOG} has a section for {version} already")
    before, heading, after = changelog.partition(f"{UNRELEASED}\n")
    if not heading:
        raise ReleaseError(f'{CHANGELOG} has no section "{UNRELEASED}"')
    section, mark, older = after.partition("\n## [")
    notes = section.strip()
    if not re.search(r"^[-*] ", notes, re.MULTILINE):
        raise ReleaseError(f'{CHANGELOG} has no entries below "{UNRELEASED}": say what users will notice')
    return Release(
        version,
        notes,
        ASSIGNMENT.sub(f'__version__ = "{version}"', version_file),
        f"{before}{heading}\n## [{version}] - {date}\n\n{notes}\n{mark}{older}",
    )


def check_ready(root: Path, version: str) -> None:
    """Raises ReleaseError unless a branch is checked out, the checkout is clean and the version has no tag."""
    if not git(root, "branch", "--show-current").strip():
        raise ReleaseError("no branch is checked out, so nothing would keep the commit: git switch BRANCH")
    if changed := git(root, "status", "--porcelain"):
        raise ReleaseError(f"the checkout is not clean; commit or remove:\n{changed.rstrip()}")
    if git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"the tag v{version} exists already")


def make(root: Path, version: str, date: str) -> Release:
    """Commits and tags. Raises ReleaseError; then nothing has changed."""
    check_ready(root, version)
    texts = [(root / path).read_text(encoding="utf-8") for path in (VERSION_FILE, CHANGELOG)]
    release = plan(version, date, *texts)
    paths = [str(VERSION_FILE), str(CHANGELOG)]
    before = git(root, "rev-parse", "HEAD").strip()
    try:
        (root / VERSION_FILE).write_text(release.version_file, encoding="utf-8")
        (root / CHANGELOG).write_text(release.changelog, encoding="utf-8")
        git(root, "commit", "--quiet", "--message", f"Release {version}", "--", *paths)
        # Not stripped of lines that begin with "#": these are the headings of the notes.
        message = f"kvoffloadd {version}\n\n{release.notes}\n"
        git(root, "tag", "--annotate", "--cleanup=whitespace", "--file=-", f"v{version}", text=message)
    except BaseException as error:
        try:
            undo(root, before, version)
        except ReleaseError as failed:
            reason = f"{error}\nIt could not be taken back: {failed}\nCompare with `git diff {before}`"
            raise ReleaseError(reason) from error
        raise
    return release


def undo(root: Path, before: str, version: str) -> None:
    """Takes back what `make` has done since `before`, a commit. Other files are left as they are: somebody may have
    written to one meanwhile.
    """
    git(root, "reset", "--quiet", "--soft", before)
    git(root, "restore", "--staged", "--worktree", "--", str(VERSION_FILE), str(CHANGELOG))
    if git(root, "tag", "--list", f"v{version}"):
        git(root, "tag", "--delete", f"v{version}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="such as 1.2.3")
    version = parser.parse_args().version
    if not re.fullmatch(r"(0|[1-9]\d*)(\.(0|[1-9]\d*)){2}", version, re.ASCII):
        parser.error(f'"{version}" is not of the form 1.2.3')
    try:
        release = make(ROOT, version, f"{datetime.now(UTC):%Y-%m-%d}")
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return EXIT_BAD
    print(release.notes)
    print(
        f"\nrelease: {version} is committed and tagged as v{version}, here only. Next: `make dist`, then "
        f"`git push --follow-tags`. To undo: `git tag --delete v{version} && git reset --keep HEAD~1`."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
