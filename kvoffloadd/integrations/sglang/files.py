"""Names the files that an engine computes with: before SGLang loads them, and again when a storage comes.

Between the two other files may have been written in their place, and then it is unknown which of them were loaded: such
an engine is in doubt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kvoffloadd.integrations.common.contents import (
    ContentsError,
    Fingerprint,
    contents_of,
    own_files_of,
    snapshot_of,
    uses_modelscope,
)
from kvoffloadd.integrations.common.remotecode import code_elsewhere

_COMMIT = re.compile(r"[0-9a-f]{40}")


class Source(NamedTuple):
    """A file or model that an argument names. `hub`: it may be a model of the hub; then `revision`: which one, None:
    its newest, and `download_dir`: where it is instead of in the hub's cache.
    """

    path: str
    hub: bool = False
    revision: str | None = None
    download_dir: str | None = None


def look_at(source: Source, how: Fingerprint | None, file: str = "config.json") -> str:
    """Names the present contents; empty for a file that is not there. `how`: as for `contents_of`. `file`: a file that
    each model of the hub has.

    Raises:
        ContentsError: the contents can't be determined.
    """
    path = os.path.expanduser(source.path)
    if not source.hub or os.path.lexists(path):
        return contents_of(path, how)
    folder = Path(_snapshot_of(source, file) or "")
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return f"hub:{folder.name}{own_files_of(str(folder), how)}"
    if source.revision and _COMMIT.fullmatch(source.revision) and not uses_modelscope():
        return f"hub:{source.revision}"  # it is not fetched yet
    raise ContentsError(f"nobody knows what is in {source.path!r}: give a local path, or a commit as --revision")


def _snapshot_of(source: Source, file: str) -> str | None:
    """Returns the snapshot's path, in `download_dir` only for a commit."""
    if not source.download_dir:
        return snapshot_of(source.path, source.revision, file)
    if not source.revision or not _COMMIT.fullmatch(source.revision) or uses_modelscope():
        return None
    repository = f"models--{source.path.replace('/', '--')}"
    return os.path.join(os.path.expanduser(source.download_dir), repository, "snapshots", source.revision)


def takes_code_from_elsewhere(model: Source) -> bool:
    """Returns whether a model's configs name code in another repository of the hub, or can't be read."""
    path = os.path.expanduser(model.path)
    folder = path if os.path.lexists(path) else snapshot_of(model.path, model.revision)
    if folder is None:
        return True
    return bool(code_elsewhere(folder))


class FilesAtStart:
    """Records the files that SGLang was about to load. All methods come from one thread. `file`: as for `look_at`."""

    def __init__(self, file: str = "config.json") -> None:
        self._file = file
        self._seen: dict[Source, str | ContentsError] = {}

    def look(self, sources: Iterable[Source]) -> None:
        """Records files, before any of them has been read."""
        self._seen = {source: self._look_or_error(source) for source in sources}

    def identity(self, source: Source, how: Fingerprint) -> str:
        """Names the contents that were loaded from there.

        Raises:
            ContentsError: they are in doubt.
        """
        before = self._seen.get(source)
        if before is None:
            raise ContentsError(
                f"nobody looked at {source.path!r} before SGLang loaded it: kvoffloadd's plug-in did not run, or the "
                "weights were changed in place since"
            )
        if isinstance(before, ContentsError):
            raise before
        named = look_at(source, how, self._file)
        if look_at(source, None, self._file) != before:
            raise ContentsError(f"{source.path!r} has changed since SGLang began to load it")
        return named

    def _look_or_error(self, source: Source) -> str | ContentsError:
        try:
            return look_at(source, None, self._file)
        except ContentsError as error:
            return error


FILES = FilesAtStart()
"""This process's files; the process has one rank. `engine.watch_start` records them."""
