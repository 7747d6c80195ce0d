"""Names of files' contents: other contents, another name; and where nothing can be said for sure, an error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common import contents
from kvoffloadd.integrations.common.contents import (
    END_BYTES,
    ContentsError,
    Fingerprint,
    contents_of,
    hub_name,
    model_of,
    snapshot_of,
)

BOTH = tuple(Fingerprint)
ANCIENT = (1e9, 1e9)
SHA = "0123456789abcdef" * 4


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is none of the kernel's own."""
    monkeypatch.setattr(contents, "_is_local", lambda *_: False)


def write(path: Path, data: bytes = b"old", times: tuple[float, float] | None = ANCIENT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if times:
        os.utime(path, times)
    return path


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("name", ["m.safetensors", "deep/shards/m.bin", "modeling_own.py", "config.json", "m"])
def test_another_file_is_another_name(how: Fingerprint, name: str, tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json")
    file = write(tmp_path / "model" / name)
    before = contents_of(tmp_path / "model", how)
    assert before.startswith("files:")
    assert contents_of(tmp_path / "model", how) == before, "nothing has changed"
    write(file, b"new", times=ANCIENT)  # of equal size and time, as images and archives make them
    assert contents_of(tmp_path / "model", how) != before
    write(tmp_path / "model" / "one-more.safetensors")
    assert len({before, contents_of(tmp_path / "model", how)}) == 2


@pytest.mark.parametrize("how", BOTH)
def test_a_model_that_is_one_file(how: Fingerprint, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf")
    before = contents_of(file, how)
    write(file, b"new")
    assert before != contents_of(file, how)
    assert "files:" in before


def put_another_in_its_place(file: Path) -> None:
    write(file.with_name("other"), b"new").rename(file)


def put_a_link_elsewhere(file: Path) -> None:
    file.unlink()
    file.symlink_to(write(file.parents[1] / "elsewhere" / "m.safetensors", b"new"))


def put_the_folder_elsewhere(file: Path) -> None:
    other = write(file.parents[1] / "new" / file.name, b"new").parent
    file.parent.rename(file.parents[1] / "away")
    other.rename(file.parent)


@pytest.mark.parametrize("change", [put_another_in_its_place, put_a_link_elsewhere, put_the_folder_elsewhere])
@pytest.mark.parametrize("how", BOTH)
def test_whatever_way_it_got_there(change: Callable[[Path], None], how: Fingerprint, tmp_path: Path) -> None:
    file = write(tmp_path / "model" / "m.safetensors")
    before = contents_of(file.parent, how)
    change(file)
    assert contents_of(file.parent, how) != before


@pytest.mark.usefixtures("foreign")
@pytest.mark.parametrize("at", [0, END_BYTES - 1, 3 * END_BYTES, 4 * END_BYTES - 1])
def test_both_ends_count_where_times_say_little(at: int, tmp_path: Path) -> None:
    data = bytearray(4 * END_BYTES)
    file = write(tmp_path / "m.safetensors", bytes(data))
    before = contents_of(file)
    data[at] = 1
    write(file, bytes(data))
    assert contents_of(file) != before
    write(file, bytes(4 * END_BYTES), times=(2e9, 2e9))
    assert contents_of(file) != before, "its time counts, too"


@pytest.mark.parametrize("size", [0, 1, END_BYTES, END_BYTES + 1])
@pytest.mark.usefixtures("foreign")
def test_short_files_where_times_say_little(size: int, tmp_path: Path) -> None:
    file = write(tmp_path / "m", bytes(size))
    before = contents_of(file)
    write(file, bytes(size) + b"x")
    assert contents_of(file) != before


def test_all_bytes_count_if_asked_for(tmp_path: Path) -> None:
    """And nothing else: two hosts with equal files share."""
    data = bytearray(4 * END_BYTES)
    one, other = write(tmp_path / "a" / "m", bytes(data)), write(tmp_path / "b" / "m", bytes(data), times=None)
    assert contents_of(one.parent, Fingerprint.CONTENTS) == contents_of(other.parent, Fingerprint.CONTENTS)
    assert contents_of(one.parent) != contents_of(other.parent)
    data[2 * END_BYTES] = 1
    write(other, bytes(data))
    assert contents_of(one.parent, Fingerprint.CONTENTS) != contents_of(other.parent, Fingerprint.CONTENTS)


@pytest.mark.parametrize("how", BOTH)
def test_the_hubs_cache_names_files_by_their_contents(how: Fingerprint, tmp_path: Path) -> None:
    found = []
    for host in ("a", "b"):
        blobs = tmp_path / host / "models--org--name" / "blobs"
        blob = write(blobs / SHA, b"not looked at: " + host.encode(), times=None)
        link = blobs.parent / "snapshots" / "c0ffee" / "m.safetensors"
        link.parent.mkdir(parents=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
        found.append(contents_of(link.parent, how))
        link.unlink()
        link.symlink_to(write(blobs / SHA[::-1]))
        assert contents_of(link.parent, how) != found[-1]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "name", [".cache/huggingface/m.lock", ".m.safetensors", "README.md", "__pycache__/m.py", "a.PNG"]
)
@pytest.mark.parametrize("how", BOTH)
def test_what_no_loader_reads(name: str, how: Fingerprint, tmp_path: Path) -> None:
    write(tmp_path / "model" / "m.safetensors")
    before = contents_of(tmp_path / "model", how)
    write(tmp_path / "model" / name)
    assert contents_of(tmp_path / "model", how) == before


def test_names_of_files_count(tmp_path: Path) -> None:
    write(tmp_path / "model" / "a.safetensors", b"1")
    file = write(tmp_path / "model" / "b.safetensors", b"2")
    before = contents_of(tmp_path / "model", Fingerprint.CONTENTS)
    file.rename(file.with_name("c.safetensors"))
    assert contents_of(tmp_path / "model", Fingerprint.CONTENTS) != before


def test_folders_that_lead_to_themselves_end(tmp_path: Path) -> None:
    write(tmp_path / "model" / "m.safetensors")
    (tmp_path / "model" / "again").symlink_to(tmp_path / "model")
    assert contents_of(tmp_path / "model") == contents_of(tmp_path / "model")


def test_nothing_has_no_name(tmp_path: Path) -> None:
    assert contents_of("org/model-of-the-hub") == contents_of(tmp_path / "no") == ""


def test_a_folder_may_be_named_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = write(tmp_path / "m.gguf")
    assert contents_of("~/m.gguf") == contents_of(file) != ""


# --- in doubt ---


def test_a_link_to_nowhere_is_not_nothing(tmp_path: Path) -> None:
    write(tmp_path / "model" / "config.json")
    (tmp_path / "model" / "m.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ContentsError, match="can't be read"):
        contents_of(tmp_path / "model")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ContentsError, match="can't be read"):
        contents_of(tmp_path / "link")


def test_what_is_no_file_says_nothing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(ContentsError, match="is not a file"):
        contents_of(tmp_path)


@pytest.mark.skipif(os.getuid() == 0, reason="root can read everything")
def test_what_can_not_be_read(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors").chmod(0)
    with pytest.raises(ContentsError, match=r"m\.safetensors can't be read: Permission denied"):
        contents_of(tmp_path)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "m.safetensors", bytes(100))
    digest = contents._digest

    def change(*arguments: Any) -> str:
        write(file, bytes(200))
        return digest(*arguments)

    monkeypatch.setattr(contents, "_digest", change)
    with pytest.raises(ContentsError, match="changes while it is read"):
        contents_of(file, Fingerprint.CONTENTS)


def test_options() -> None:
    assert Fingerprint.of("contents", "x") is Fingerprint.CONTENTS
    with pytest.raises(UsageError, match="--flag: fingerprint must be 'auto' or 'contents', not 'head'"):
        Fingerprint.of("head", "--flag")


def test_file_systems_of_the_kernel_are_local(tmp_path: Path) -> None:
    """Of the tests' own one nothing is known, of shared memory it is."""
    for folder, expected in ((Path("/dev/shm"), True), (Path("/proc/self"), False)):
        fd = os.open(folder, os.O_RDONLY)
        assert contents._is_local(fd, str(folder)) is expected
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        contents._is_local(fd, "closed")


# --- models of the hub ---


def hub(found: object) -> Any:
    def look(repo: str, file: str, revision: str | None = None) -> object:
        if repo == "not/a/name":
            raise ValueError(repo)
        assert (file, revision) == ("config.json", None)
        return found

    return SimpleNamespace(try_to_load_from_cache=look)


@pytest.mark.parametrize(
    ("found", "folder"),
    [("/hub/snapshots/c0ffee/config.json", "/hub/snapshots/c0ffee"), (None, None), (object(), None)],
)
def test_a_model_of_the_hub_lies_in_its_cache(
    found: object, folder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub(found))
    assert snapshot_of("org/name", "") == folder
    assert snapshot_of("not/a/name") is None


def test_without_the_hubs_client_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert snapshot_of("org/name") is None


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize("how", BOTH)
def test_a_snapshot_of_the_hub_is_named_by_its_commit(how: Fingerprint, tmp_path: Path) -> None:
    """Whatever of it has been fetched; a file that is not the hub's is named too."""
    models = tmp_path / "models--org--name"
    blob = write(models / "blobs" / SHA)
    folder = models / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(blob)
    assert model_of(folder, how) == f"hub:org--name@{COMMIT}"
    assert hub_name(str(folder)) == "org/name"
    (folder / "model.safetensors").symlink_to(blob)
    assert model_of(folder, how) == f"hub:org--name@{COMMIT}"
    own = write(folder / "own.py")
    before = model_of(folder, how)
    assert before != f"hub:org--name@{COMMIT}"
    write(own, b"new")
    assert model_of(folder, how) != before


@pytest.mark.parametrize("how", BOTH)
def test_other_folders_are_named_by_their_contents(how: Fingerprint, tmp_path: Path) -> None:
    write(tmp_path / "config.json")
    assert model_of(tmp_path, how) == contents_of(tmp_path, how)
    assert hub_name(str(tmp_path)) == ""
    assert model_of(f"/nowhere/models--org--name/snapshots/{COMMIT}", how) == "", "nothing is there"


def test_a_model_is_looked_for_by_any_of_its_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def look(*given: object, revision: str | None = None) -> str:
        asked.append((*given, revision))
        return "/hub/snapshots/c0ffee/adapter_config.json"

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(try_to_load_from_cache=look))
    assert snapshot_of("org/name", "v2", "adapter_config.json") == "/hub/snapshots/c0ffee"
    assert asked == [("org/name", "adapter_config.json", "v2")]
