"""Files that SGLang has loaded: what was there before and after; anything else is in doubt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.integrations.common import contents
from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint
from kvoffloadd.integrations.sglang.files import FilesAtStart, Source, look_at, takes_code_from_elsewhere

COMMIT, NEWER = "0123456789" * 4, "f" * 40


def write(path: Path, content: str) -> Source:
    """Writes files of equal size and time: other contents of a file whose time is set."""
    path.write_text(content)
    os.utime(path, (1e9, 1e9))
    return Source(str(path))


@pytest.mark.parametrize("how", Fingerprint)
def test_what_is_as_it_was_is_known(how: Fingerprint, tmp_path: Path) -> None:
    files = FilesAtStart()
    source = write(tmp_path / "m.gguf", "old")
    files.look([source])
    assert files.identity(source, how) == look_at(source, how)


@pytest.mark.parametrize("times", contents._Times)
@pytest.mark.parametrize("how", Fingerprint)
def test_what_was_written_again_is_in_doubt(
    how: Fingerprint, times: contents._Times, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_times", lambda *_: times)
    files = FilesAtStart()
    source = write(tmp_path / "m.gguf", "old")
    files.look([source])
    write(tmp_path / "m.gguf", "new")
    with pytest.raises(ContentsError, match=r"m\.gguf' has changed since SGLang began to load it"):
        files.identity(source, how)


def test_what_changes_while_it_is_named_is_in_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = FilesAtStart()
    source = write(tmp_path / "m.gguf", "old")
    files.look([source])
    digest = contents._digest

    def slow(*given: Any) -> str:
        found = digest(*given)
        write(tmp_path / "m.gguf", "new")
        return found

    monkeypatch.setattr(contents, "_digest", slow)
    with pytest.raises(ContentsError, match="has changed"):
        files.identity(source, Fingerprint.CONTENTS)


def test_what_nobody_has_looked_at_is_in_doubt(tmp_path: Path) -> None:
    source = write(tmp_path / "m.gguf", "old")
    with pytest.raises(ContentsError, match=r"nobody looked at .*plug-in did not run"):
        FilesAtStart().identity(source, Fingerprint.AUTO)


def test_what_could_not_be_read_at_first_stays_in_doubt(tmp_path: Path) -> None:
    files = FilesAtStart()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    source = Source(str(tmp_path / "link"))
    files.look([source])
    write(tmp_path / "nowhere", "now it is there")
    with pytest.raises(ContentsError, match="can't be read"):
        files.identity(source, Fingerprint.AUTO)


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None, str], str]:
    """Hugging Face's cache: which snapshot it has of a model and revision, if there is that file."""
    found: dict[tuple[str, str | None, str], str] = {}

    def lookup(model: str, file: str, revision: str | None = None) -> str | None:
        commit = found.get((model, revision, file))
        return commit and str(tmp_path / "snapshots" / commit / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=lookup))
    return found


def test_models_of_the_hub_are_named_by_commit(cached: dict[tuple[str, str | None, str], str]) -> None:
    newest, tagged = Source("org/m", True), Source("org/m", True, "v1")
    cached[("org/m", None, "config.json")] = COMMIT
    files = FilesAtStart()
    files.look([newest])
    assert files.identity(newest, Fingerprint.AUTO) == f"hub:{COMMIT}"
    assert look_at(Source("org/m", True, COMMIT, "/anywhere"), Fingerprint.AUTO) == f"hub:{COMMIT}"
    for unknown in (tagged, Source("org/m", True, None, "/anywhere"), Source("s3://bucket/m", True)):
        with pytest.raises(ContentsError, match=r"nobody knows what is in .*commit as --revision"):
            look_at(unknown, Fingerprint.AUTO)
    cached[("org/m", None, "config.json")] = NEWER
    with pytest.raises(ContentsError, match="has changed"):
        files.identity(newest, Fingerprint.AUTO)


@pytest.mark.parametrize("by_folder", [True, False])
def test_models_of_the_hub_that_are_edited_in_its_cache(
    by_folder: bool, cached: dict[tuple[str, str | None, str], str], tmp_path: Path
) -> None:
    """The commit does not say so. `by_folder`: of `--download-dir`."""
    folder = tmp_path / ("models--org--m/snapshots" if by_folder else "snapshots") / COMMIT
    source = Source("org/m", True, COMMIT, str(tmp_path) if by_folder else None)
    assert look_at(source, Fingerprint.AUTO) == f"hub:{COMMIT}", "it is not fetched yet"
    files = FilesAtStart()
    files.look([source])
    cached[("org/m", COMMIT, "config.json")] = COMMIT
    folder.mkdir(parents=True)
    assert files.identity(source, Fingerprint.AUTO) == f"hub:{COMMIT}", "it was fetched meanwhile"
    write(folder / "config.json", "edited")
    assert look_at(source, Fingerprint.AUTO) != f"hub:{COMMIT}"
    with pytest.raises(ContentsError, match="has changed"):
        files.identity(source, Fingerprint.AUTO)


def test_models_of_modelscope_are_not_known(
    cached: dict[tuple[str, str | None, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached[("org/m", None, "config.json")] = COMMIT
    monkeypatch.setenv("SGLANG_USE_MODELSCOPE", "true")
    for source in (Source("org/m", True), Source("org/m", True, COMMIT), Source("org/m", True, COMMIT, "/anywhere")):
        with pytest.raises(ContentsError, match="nobody knows"):
            look_at(source, Fingerprint.AUTO)


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json"])
def test_code_of_another_repository(name: str, tmp_path: Path) -> None:
    own, others = '{"auto_map": {"AutoModel": "m.Own"}}', '{"auto_map": {"AutoModel": ["org/code--m.Own", null]}}'
    assert takes_code_from_elsewhere(Source("org/never-fetched", True))
    for text, elsewhere in ((own, False), (others, True), ("[]", False), ("no JSON", False)):
        write(tmp_path / name, text)
        assert takes_code_from_elsewhere(Source(str(tmp_path))) is elsewhere
    write(tmp_path / name, own)
    write(tmp_path / "tokenizer_config.json", others)
    assert not takes_code_from_elsewhere(Source(str(tmp_path))), "token ids are named"


def test_a_folder_that_is_no_snapshot_names_nothing(
    cached: dict[tuple[str, str | None, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached[("org/m", None, "config.json")] = "main"
    with pytest.raises(ContentsError, match="nobody knows"):
        look_at(Source("org/m", True), Fingerprint.AUTO)
