"""Tests names of files' contents: other contents have another name; where that can't be guaranteed, it is an error."""

from __future__ import annotations

import hashlib
import mmap
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
    own_files_of,
    snapshot_of,
)

BOTH = tuple(Fingerprint)
Times = contents._Times
ANCIENT = (1e9, 1e9)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever file system the tests have: one on a disk of this host."""
    monkeypatch.setattr(contents, "_times", lambda *_: Times.TELL)


@pytest.fixture
def foreign(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is none of the kernel's own."""
    monkeypatch.setattr(contents, "_times", lambda *_: Times.UNKNOWN)


@pytest.fixture
def image(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system's times are those that its maker chose, or another's."""
    monkeypatch.setattr(contents, "_times", lambda *_: Times.SAY_NOTHING)


def blob_of(hub: Path, data: bytes, *, large: bool = False) -> Path:
    """Makes a blob as the hub's client stores it."""
    digest = hashlib.sha256(data) if large else hashlib.sha1(b"blob %d\0" % len(data) + data)
    return write(hub / "blobs" / digest.hexdigest(), data)


def snapshot(hub: Path, **files: bytes) -> Path:
    """Makes the snapshot of a model's folder in the hub's cache. `weights` are large files."""
    folder = hub / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).symlink_to(os.path.relpath(blob_of(hub, data, large=name == "weights"), folder))
    return folder


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


@pytest.mark.usefixtures("image")
def test_all_bytes_count_where_times_say_nothing(tmp_path: Path) -> None:
    """Two images with equal times and inodes; and a second look reads the ends alone."""
    data = bytearray(4 * END_BYTES)
    file = write(tmp_path / "m.safetensors", bytes(data))
    before, seen = contents_of(file), contents_of(file, None)
    data[2 * END_BYTES] = 1
    other = write(tmp_path / "other" / "m.safetensors", bytes(data))
    assert contents_of(other) != before
    os.replace(other, file)
    assert contents_of(file) != before, "what was read before is not taken for another file's"
    assert contents_of(file, None) != seen


@pytest.mark.usefixtures("image")
def test_all_bytes_are_read_once_for_each_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request asks again about an adapter."""
    file = write(tmp_path / "m.safetensors")
    before = contents_of(file)
    monkeypatch.setattr(contents, "_digest", None)
    assert contents_of(file) == before
    write(file, b"new")
    with pytest.raises(TypeError):
        contents_of(file)


def test_memory_says_nothing_of_writes_through_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = Path(f"/dev/shm/kvoffloadd-test-{os.getpid()}")
    try:
        path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[0] == 0, "mapped before it is named"
            times = [path.stat().st_mtime_ns]
            before = contents_of(path)
            mapped[0] = 1
            times.append(path.stat().st_mtime_ns)
        contents._digests.clear()
        assert times[0] == times[1]
        assert contents_of(path) != before
    finally:
        path.unlink()


def edit(link: Path, data: bytes) -> None:
    """Writes through the link, in place, as editors do; long after it was made."""
    link.write_bytes(data)
    os.utime(link, (4e9, 4e9))


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("named", [contents_of, model_of])
def test_the_hubs_cache_names_files_by_their_contents(
    named: Callable[..., str], how: Fingerprint, tmp_path: Path
) -> None:
    found = [named(snapshot(tmp_path / host / "models--org--m", weights=b"old"), how) for host in ("a", "b")]
    assert found[0] == found[1]
    assert contents_of(snapshot(tmp_path / "c" / "models--org--m", weights=b"new"), how) != found[0]


@pytest.mark.parametrize("how", [*BOTH, None])
@pytest.mark.parametrize("named", [contents_of, model_of])
@pytest.mark.parametrize("name", ["config.json", "weights"])
def test_the_hubs_files_that_are_edited_in_place(
    name: str, named: Callable[..., str], how: Fingerprint | None, tmp_path: Path
) -> None:
    """Model cards advise this to users who want longer contexts."""
    folders = [
        snapshot(tmp_path / host / "models--org--m", **{"config.json": b"{}", "weights": b"old"}) for host in ("a", "b")
    ]
    before = named(folders[0], how)
    edit(folders[0] / name, b"new")
    after = named(folders[0], how)
    assert after != before
    assert named(folders[1], how) == before
    edit(folders[0] / name, b"NEW")
    assert named(folders[0], how) not in (before, after)


def test_the_hubs_weights_are_read_where_they_are_younger_than_their_link(tmp_path: Path) -> None:
    """A copy may be; it is what it was, if all of its bytes are. By contents they are read in any case."""
    folder = snapshot(tmp_path / "models--org--m", weights=b"old")
    before = model_of(folder)
    edit(folder / "weights", b"old")
    assert model_of(folder) == before
    link = write(tmp_path / "link", times=None)
    link.unlink()
    link.symlink_to(folder / "weights")
    os.utime(link, (8e9, 8e9), follow_symlinks=False)
    edit(folder / "weights", b"new")
    assert contents_of(link) != contents_of(snapshot(tmp_path / "b" / "models--org--m", weights=b"old") / "weights")
    os.utime(folder / "weights", ANCIENT)
    assert model_of(folder, Fingerprint.CONTENTS) != before


def test_large_files_of_the_hub_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds as long as they have not been written to, and reading them has not been asked for."""
    folder = snapshot(tmp_path / "models--org--m", weights=b"old")
    monkeypatch.setattr(contents, "_digest", None)
    assert model_of(folder) == model_of(folder, None) == f"hub:org--m@{COMMIT}"


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


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files and folders that can't be read, not even by root."""
    names: set[str] = set()

    def refusing(call: Any) -> Any:
        def refuse(path: Any, *arguments: Any, **named: Any) -> Any:
            if os.path.basename(path) in names:
                raise PermissionError(13, "Permission denied", path)
            return call(path, *arguments, **named)

        return refuse

    for name in ("open", "listdir"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name)))
    return names


@pytest.mark.parametrize("how", [*BOTH, None])
@pytest.mark.parametrize("name", ["lost+found", "own.py"])
def test_what_no_loader_may_read_either(name: str, how: Fingerprint | None, closed: set[str], tmp_path: Path) -> None:
    """A separate volume has `lost+found`. It counts as it is: once it can be read, the name is another."""
    model = tmp_path / "model"
    write(model / "m.safetensors")
    alone = contents_of(model, how)
    write(model / name) if name.endswith(".py") else write(model / name / "file")
    readable = contents_of(model, how)
    closed.add(name)
    assert len({alone, readable, contents_of(model, how)}) == 3
    assert contents_of(model, how) == contents_of(model, how)


def test_a_model_that_can_not_be_read(closed: set[str], tmp_path: Path) -> None:
    file = write(tmp_path / "model" / "m.safetensors")
    for path in (file, file.parent):
        closed.add(path.name)
        with pytest.raises(ContentsError, match=rf"{path.name} can't be read: Permission denied"):
            contents_of(path)


def test_a_link_to_nowhere_that_no_loader_would_follow(tmp_path: Path) -> None:
    write(tmp_path / "model" / "m.safetensors")
    before = contents_of(tmp_path / "model")
    (tmp_path / "model" / "README.md").symlink_to(tmp_path / "gone")
    assert contents_of(tmp_path / "model") == before
    (tmp_path / "model" / "folder.md").symlink_to(write(tmp_path / "elsewhere" / "m.safetensors").parent)
    assert contents_of(tmp_path / "model") != before


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


def test_what_times_say_on_which_file_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the tests' file system, but something is of shared memory."""
    monkeypatch.undo()
    for folder, expected in ((Path("/dev/shm"), Times.SAY_NOTHING), (Path("/proc/self"), Times.UNKNOWN)):
        fd = os.open(folder, os.O_RDONLY)
        assert contents._times(fd, str(folder)) is expected
        os.close(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        contents._times(fd, "closed")
    assert not contents._TIMES_TELL & contents._TIMES_SAY_NOTHING
    for image_or_memory in (0x73717368, 0xE0F5E1E2, 0x794C7630, 0x01021994):  # statfs(2), linux/magic.h
        assert image_or_memory in contents._TIMES_SAY_NOTHING


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


@pytest.mark.parametrize("variable", ["VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE"])
def test_models_of_another_hub_are_not_looked_for(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of that name in the cache may be another one."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub("/hub/snapshots/c0ffee/config.json"))
    for value, found in (("False", True), ("0", True), ("True", False), ("1", False)):
        monkeypatch.setenv(variable, value)
        assert (snapshot_of("org/name", "") is not None) is found


@pytest.mark.parametrize("how", BOTH)
def test_a_snapshot_of_the_hub_is_named_by_its_commit(how: Fingerprint, tmp_path: Path) -> None:
    """Whatever of it has been fetched; a file that is not the hub's is named too."""
    folder = snapshot(tmp_path / "models--org--name", **{"config.json": b"{}"})
    assert model_of(folder, how) == f"hub:org--name@{COMMIT}"
    assert hub_name(str(folder)) == "org/name"
    (folder / "model.safetensors").symlink_to(blob_of(folder.parents[1], b"weights", large=True))
    assert model_of(folder, how) == f"hub:org--name@{COMMIT}"
    own = write(folder / "own.py")
    before = model_of(folder, how)
    assert before == f"hub:org--name@{COMMIT}{own_files_of(str(folder), how)}" != f"hub:org--name@{COMMIT}"
    assert own_files_of(str(tmp_path / "nowhere"), how) == ""
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
