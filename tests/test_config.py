"""Units, the config file and overrides."""

from __future__ import annotations

import dataclasses
import os
import pwd
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffloadd import checks, config, socketpath
from kvoffloadd.cli.report import config_text
from kvoffloadd.errors import ConfigError
from kvoffloadd.quotalimits import QuotaLimits
from kvoffloadd.testing.wait import HANG_S
from kvoffloadd.units import BYTES_MAX, format_bytes, format_path, format_seconds, parse_bytes

SHIPPED = Path(__file__).parent.parent / "config" / "kvoffloadd.toml"
MIB, GIB = 1 << 20, 1 << 30


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvoffloadd.toml"
    path.write_text(text, encoding="utf-8")
    return path


def problems(path: Path | None, **overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config.load(path, {name.replace("__", "."): text for name, text in overrides.items()})
    return str(raised.value).splitlines()


# --- units --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("4096", 4096), ("4096B", 4096), ("64GiB", 64 * GIB), (" 512 MiB ", 512 * MIB), ("1.5KiB", 1536)],
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a size"),
        ("-1", "not a size"),
        ("many", "not a size"),
        ("1e9", "not a size"),
        ("1 2", "not a size"),
        ("٣", "not a size"),
        ("64GB", 'unknown unit "GB"; write B, KiB, MiB, GiB, TiB or PiB (powers of 1024); did you mean 64GiB?'),
        ("64gib", "did you mean 64GiB?"),
        ("1.5t", "did you mean 1.5TiB?"),
        ("8XB", 'unknown unit "XB"; write B, KiB, MiB, GiB, TiB or PiB (powers of 1024)'),
        ("0.3B", "whole number"),
        ("5000PiB", "4,096 PiB"),
    ],
)
def test_parse_bytes_refuses(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        parse_bytes(text)


@given(st.integers(min_value=0, max_value=BYTES_MAX))
def test_formatted_bytes_are_exact_or_close(size: int) -> None:
    text = format_bytes(size).replace(",", "")
    if "." not in text:
        assert parse_bytes(text) == size
    else:
        number, unit = text.split()
        assert float(number) * parse_bytes("1" + unit) == pytest.approx(size, rel=0.006)


def test_format_seconds() -> None:
    shown = [format_seconds(seconds) for seconds in (0, 2e-5, 0.0123, 5, 119.94, 605, 7300, 200_000)]
    assert shown == ["0 us", "20 us", "12.3 ms", "5.0 s", "119.9 s", "10 min 5 s", "2 h 1 min", "2 d 7 h"]


# --- the shipped file ---------------------------------------------------------------------------------


def test_shipped_file_equals_the_defaults() -> None:
    """Except for the socket of a user without a config, who is not the service's."""
    assert config.load(SHIPPED) == config.Config()
    bare = config.load(None)
    assert dataclasses.replace(bare, server=dataclasses.replace(bare.server, socket=config.ServerConfig().socket)) == (
        config.Config()
    )


def test_shipped_file_has_every_key_with_a_comment() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    known = {name: [key.name for key in dataclasses.fields(section)] for name, section in config.SECTIONS.items()}
    assert {name: list(table) for name, table in tomllib.loads(text).items()} == known
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if "=" in line and not line.startswith("#"):
            assert lines[number - 1].startswith("# "), f"line {number + 1} has no comment: {line}"


def test_sections_are_the_fields_of_config() -> None:
    assert list(config.SECTIONS) == [section.name for section in dataclasses.fields(config.Config)]
    for name, section in config.SECTIONS.items():
        assert getattr(config.Config(), name) == section()
        for key in dataclasses.fields(section):
            assert callable(key.metadata["check"]), f"{name}.{key.name} has no check"


def test_defaults_pass_their_own_checks(tmp_path: Path) -> None:
    assert config.load(write(tmp_path, config_text(config.Config()))) == config.Config()


# --- values -------------------------------------------------------------------------------------------


def test_values_are_read_and_typed(tmp_path: Path) -> None:
    me = pwd.getpwuid(os.getuid()).pw_name
    loaded = config.load(
        write(
            tmp_path,
            f"""
            [server]
            socket = "/tmp/x.sock"
            allowed_uids = [7, "{me}", 7]
            drain_s = 3
            use_uvloop = false
            [memory]
            capacity_bytes = "1.5GiB"
            slab_bytes = 8192
            verify_loads = true
            """,
        )
    )
    assert loaded.server.socket == Path("/tmp/x.sock")
    assert loaded.server.allowed_uids == tuple(sorted({7, os.getuid()}))
    assert isinstance(loaded.server.drain_s, float)
    assert loaded.server.use_uvloop is False
    assert (loaded.memory.capacity_bytes, loaded.memory.slab_bytes) == (1536 * MIB, 8192)
    assert loaded.memory.verify_loads is True
    assert loaded.copy == config.CopyConfig()


def test_a_slab_is_no_larger_than_the_tier() -> None:
    assert config.load(None, {"memory.capacity_bytes": "1MiB"}).memory.slab_bytes == MIB


@pytest.mark.parametrize(
    ("capacity", "slab"),
    [("4KiB", 4096), ("8MiB", 8 * MIB), ("64MiB", 8 * MIB), ("1GiB", 16 * MIB), ("4GiB", 64 * MIB), ("1TiB", 64 * MIB)],
)
def test_slabs_suit_the_tier_where_nobody_chooses(capacity: str, slab: int) -> None:
    assert config.load(None, {"memory.capacity_bytes": capacity}).memory.slab_bytes == slab
    chosen = config.load(None, {"memory.capacity_bytes": capacity, "memory.slab_bytes": "4KiB"})
    assert chosen.memory.slab_bytes == 4096


ROOTS = (config.DiskRoot(Path("/nvme0/kvo"), 1 << 40), config.DiskRoot(Path('/nvme1/a "b"'), 5_000_000))


@pytest.mark.parametrize(
    "text",
    [
        """
        [disk]
        roots = [{ path = "/nvme0/kvo", capacity = "1TiB" }, { path = '/nvme1/a "b"', capacity = 5000000 }]
        demote = "evict"
        """,
        """
        [disk]
        demote = "evict"
        [[disk.roots]]
        path = "/nvme0/kvo"
        capacity = "1TiB"
        [[disk.roots]]
        path = '/nvme1/a "b"'
        capacity = 5000000
        """,
    ],
)
def test_disk_roots_are_read_and_shown(tmp_path: Path, text: str) -> None:
    loaded = config.load(write(tmp_path, text))
    assert loaded.disk == config.DiskConfig(roots=ROOTS, demote="evict")
    shown = config_text(loaded)
    assert '{ path = "/nvme0/kvo", capacity = 1099511627776 },  # 1 TiB' in shown
    assert config.load(write(tmp_path, shown)) == loaded


def test_disk_values_are_read_and_typed() -> None:
    settings = {
        "segment_bytes": "1MiB", "admit": "second-use", "write_bytes_per_s": "200MiB", "write_ops_per_s": "500",
        "backlog_bytes": "4096", "read_threads": "1", "write_threads": "256", "direct": "false",
        "min_free_bytes": "0", "rewrite_hot": "false", "retry_s": "1", "flush_s": "0",
    }  # fmt: skip
    loaded = config.load(None, {f"disk.{key}": text for key, text in settings.items()})
    assert loaded.disk == config.DiskConfig(
        segment_bytes=MIB, admit="second-use", write_bytes_per_s=200 * MIB, write_ops_per_s=500,
        backlog_bytes=4096, read_threads=1, write_threads=256, direct=False,
        min_free_bytes=0, rewrite_hot=False, retry_s=1.0, flush_s=0.0,
    )  # fmt: skip
    assert "write_bytes_per_s = 209715200  # 200 MiB" in config_text(loaded)


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["/a", "/b", "/ab", "/a-b/c"], []),
        (["/a", "/b", "/a/"], ["disk.roots: /a is named twice"]),
        (["/a/b", "/a/x/../b"], ["disk.roots: /a/b is named twice"]),
        (["/a", "/a/b/c"], ["disk.roots: /a/b/c lies inside /a; each root needs a separate directory"]),
        (["/a/b/", "/"], ["disk.roots: /a/b lies inside /; each root needs a separate directory"]),
    ],
)
def test_disk_roots_are_apart_from_each_other(paths: list[str], found: list[str]) -> None:
    roots = ", ".join(f'{{ path = "{path}", capacity = "1GiB" }}' for path in paths)
    if not found:
        assert len(config.load(None, {"disk.roots": f"[{roots}]"}).disk.roots) == len(paths)
        return
    got = problems(None, disk__roots=f"[{roots}]", log__level="loud")
    assert got[0] == "options: 2 problems:"
    assert [line.strip() for line in got[2:]] == found


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.Config().memory.policy = "lru"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("server.socket", '"kv.sock"', "must be an absolute path"),
        ("server.socket", "7", "must be a path in quotes"),
        ("server.socket", '"/' + 107 * "x" + '"', "has 108 bytes; the path of a socket may have at most 107"),
        (
            "server.socket_mode",
            "660",
            "is 0o1224, must be from 0o600 to 0o666, without execute bits; did you mean 0o660?",
        ),
        ("server.socket_mode", "0o777", "is 0o777, must be from 0o600 to 0o666"),
        ("server.socket_mode", "0o060", "is 0o60, must be from"),
        ("server.socket_mode", '"0660"', "must be an octal number like 0o660"),
        ("server.allowed_uids", '"root"', "must be a list of user ids and names"),
        (
            "server.allowed_uids",
            '["no-such-user"]',
            'names the user "no-such-user", which does not exist on this machine',
        ),
        ("server.allowed_uids", "[-1]", "contains -1, which is neither"),
        ("server.allowed_uids", "[true]", "contains True, which is neither"),
        ("server.partial_frame_s", "0", "must be from 0.05 to 3600 seconds"),
        ("server.partial_frame_s", "nan", "must be a number of seconds"),
        ("server.drain_s", "true", "must be a number of seconds"),
        ("server.use_uvloop", '"yes"', 'must be true, false or "auto"'),
        ("memory.capacity_bytes", "0", "must be from 4 KiB to 4,096 PiB"),
        ("memory.capacity_bytes", "4097", "must be a multiple of 4096 bytes"),
        ("memory.capacity_bytes", '"4GB"', "did you mean 4GiB?"),
        ("memory.capacity_bytes", "true", "must be a number of bytes"),
        ("memory.capacity_bytes", "4096.0", "must be a number of bytes"),
        ("memory.policy", "1", 'must be one of "", "hit-density", "lru", "s3-fifo"'),
        ("memory.policy", '"lfu"', 'did you mean "lru"?'),
        ("mooncake.master", "1", "must be text in quotes"),
        ("memory.capacity_bytes", "8", "did you mean 8GiB?"),
        ("memory.capacity_bytes", '"8"', "did you mean 8GiB?"),
        ("copy.chunk_bytes", "64", "did you mean 64MiB?"),
        ("memory.verify_loads", "1", 'must be true, false or "auto"'),
        ("copy.threads", "0", "must be from 1 to 256"),
        ("copy.threads", "true", "must be an integer"),
        ("copy.threads", "2.0", "must be an integer"),
        ("disk.roots", '"/nvme0"', "must be a list like [{ path ="),
        ("disk.roots", '["/nvme0"]', "must be a list like [{ path ="),
        ("disk.roots", '[{ path = "nvme0", capacity = "1TiB" }]', "entry 1: path must be an absolute path"),
        ("disk.roots", '[{ path = "/a\\u0000", capacity = "1TiB" }]', "entry 1: path must not contain a NUL character"),
        ("disk.roots", '[{ path = "/a", capacity = "1TB" }]', 'entry 1: capacity has the unknown unit "TB"'),
        ("disk.roots", '[{ path = "/a", capacity = 4194303 }]', "entry 1: capacity must be from 4 MiB"),
        ("disk.roots", '[{ path = "/a", capacity = 8388608, mode = 1 }]', 'entry 1: "mode" is unknown; known are path'),
        (
            "disk.roots",
            '[{ path = "/a", capacity = "1TiB" }, { capacity = true }]',
            "entry 2: path is missing; entry 2: capacity must be a number of bytes",
        ),
        ("disk.segment_bytes", '"512KiB"', "must be from 1 MiB to 16 GiB"),
        ("disk.segment_bytes", "1048577", "must be a multiple of 4096 bytes"),
        ("disk.demote", '"never"', 'must be one of "seal", "evict"'),
        ("disk.admit", '"third-use"', 'must be one of "always", "second-use"'),
        ("disk.write_bytes_per_s", "-1", "must be from 0 B to"),
        ("disk.write_ops_per_s", '"1MiB"', "must be an integer"),
        ("disk.backlog_bytes", "0", "must be from 4 KiB"),
        ("disk.read_threads", "0", "must be from 1 to 256"),
        ("disk.direct", '"maybe"', 'must be true, false or "auto"'),
        ("disk.rewrite_hot", '"auto"', "must be true or false"),
        ("disk.retry_s", "0", "must be from 0.05 to 3600 seconds"),
        ("disk.flush_s", "-1", "must be from 0 to 3600 seconds"),
        ("log.level", '"loud"', 'must be one of "debug", "info", "warning", "error"'),
        ("log.format", "1979-05-27", "must be one of"),
    ],
)
def test_a_wrong_value_is_refused_with_key_value_line_and_reason(
    tmp_path: Path, key: str, text: str, reason: str
) -> None:
    section, name = key.split(".")
    heading, problem = problems(write(tmp_path, f"# a comment\n[{section}]\n\n{name} = {text}\n"))
    assert heading == f"{tmp_path}/kvoffloadd.toml: 1 problem:"
    assert problem.startswith(f"  line 4: {key} = ")
    assert reason in problem


def test_all_problems_are_reported_together(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'top = 1\n[memroy]\n[memory]\ncapacity_byte = 3\nslab_bytes = "1KB"\n[copy]\nthreads = 0\n[limits]\njobs = 1\n',
    )
    heading, *found = problems(path, log__level="loud", nonsense="1")
    assert heading.endswith(": 7 problems:")
    assert sorted(line.strip()[:33] for line in found) == sorted(
        line[:33]
        for line in [
            "line 1: top: keys must be in a [section]",
            "[memroy]: unknown section; did you mean memory?",
            "line 4: memory.capacity_byte = 3: unknown key; did you mean capacity_bytes?",
            'line 5: memory.slab_bytes = "1KB": has the unknown unit',
            "line 7: copy.threads = 0: must be",
            'override: log.level = "loud": must be',
            "override: nonsense: must have the form section.key",
        ]
    )


@pytest.mark.parametrize(
    ("stuck_s", "deadline_s", "words"),
    [
        (4.9, None, "set stuck_s to 5 or more, or valkey.deadline_s to 3.92 or less"),
        (5, 10, "set stuck_s to 12.5 or more, or valkey.deadline_s to 4 or less"),
        (None, 4.5, "set stuck_s to 5.625 or more"),
        (5, 4, ""),
        (0.5, 0.4, ""),
    ],
)
def test_the_agent_is_not_killed_before_its_calls_can_end(
    tmp_path: Path, stuck_s: float | None, deadline_s: float | None, words: str
) -> None:
    text = '[remote]\nengine = "valkey"\n'
    text += "" if stuck_s is None else f"stuck_s = {stuck_s}\n"
    text += '[valkey]\nurl = "redis://10.0.0.1"\n'
    text += "" if deadline_s is None else f"deadline_s = {deadline_s}\n"
    path = write(tmp_path, text)
    if not words:
        config.load(path)
        return
    (_, problem) = problems(path)
    assert f"remote.stuck_s = {5 if stuck_s is None else stuck_s}: " in problem
    assert words in problem
    config.load(write(tmp_path, text.replace('"valkey"', '"memory"\ndirectory = "/x"')))


def test_a_long_value_is_cut_in_the_message(tmp_path: Path) -> None:
    assert len(problems(write(tmp_path, f'[log]\nlevel = "{"x" * 500}"\n'))[1]) < 200


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[server\n", "is not valid TOML: .*line 1"),
        (b"a = '\xff'\n", "is not UTF-8 text: byte 5"),
        (b"a = " + 100_000 * b"[", "is not valid TOML: arrays or tables are nested too deeply"),
        (b"[disk]\nwrite_ops_per_s = " + 5_000 * b"9", "is not valid TOML: a number has thousands of digits"),
        (b"[disk]\nroots = [0x" + 5_000 * b"f" + b"]", "is not valid TOML: a number has thousands of digits"),
        (b"[disk]\nstuck_s = " + 400 * b"9", "disk.stuck_s = 9+...: must be from"),
    ],
)
def test_a_file_that_is_no_toml(tmp_path: Path, text: bytes, reason: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match=reason):
        config.load(path)


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[copy]\r\nthreads = 3\r\n")
    assert config.load(path).copy.threads == 3
    path.write_bytes(b"\xef\xbb\xbf[copy]\nthreads = 0\n")
    assert "line 2: copy.threads = 0" in problems(path)[1]


def test_an_override_that_is_nested_deeply_is_text() -> None:
    assert "must be an integer" in problems(None, copy__threads=100_000 * "[")[1]


@pytest.mark.parametrize("key", ["server__allowed_uids", "cuda__ipc_uids"])
def test_no_number_that_stands_for_many_is_a_user(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    """Only where some users have no number; elsewhere it is one user's."""
    chosen = {key.replace("__", "."): "[65533, 65534]"}
    for nobody in (None, 99):
        monkeypatch.setattr(socketpath, "unmapped_uid", lambda nobody=nobody: nobody)
        config.load(None, chosen)
    monkeypatch.setattr(socketpath, "unmapped_uid", lambda: 65534)
    (found,) = problems(None, **{key: "[65533, 65534]"})[1:]
    assert f"{key.replace('__', '.')}: 65534 stands for every user without a number in this user namespace" in found


def test_one_job_needs_one_key() -> None:
    """Another key that contradicts it gets a remark."""
    chosen = config.load(None, {"limits.jobs": "1"})
    assert (chosen.limits.jobs_of_session, len(list(config.remarks(chosen)))) == (1, 1)
    assert "is more than limits.jobs = 1" in next(config.remarks(chosen))
    chosen = config.load(None, {"limits.jobs_per_session": "7"})
    assert (chosen.limits.jobs_of_session, list(config.remarks(chosen))) == (7, [])
    assert list(config.remarks(config.load(None, {}))) == []


@pytest.mark.parametrize("engine", ["", "mooncake"])
def test_a_store_that_is_not_used_is_told(engine: str) -> None:
    """Somebody has forgotten a line, and would see no sign of it."""
    settings = {"valkey.url": "redis://a", "mooncake.master": "a:1", "mooncake.host": "b", "remote.engine": engine}
    told = list(config.remarks(config.load(None, settings)))
    assert told[-1] == f'valkey.url: is not used, since remote.engine is "{engine}", not "valkey"'
    assert len(told) == (1 if engine else 2)


def test_the_server_s_other_name_is_understood() -> None:
    assert 'did you mean "valkey"?' in problems(None, remote__engine="redis")[1]


@pytest.mark.parametrize(("capacity", "slab", "count"), [("8MiB", "0", 1), ("16MiB", "0", 0), ("3MiB", "2MiB", 1)])
def test_a_memory_of_one_slab_is_told(capacity: str, slab: str, count: int) -> None:
    chosen = config.load(None, {"memory.capacity_bytes": capacity, "memory.slab_bytes": slab})
    remarks = list(config.remarks(chosen))
    assert len(remarks) == count
    assert all("payloads of two sizes, in 4 KiB pages, can't be held together" in one for one in remarks)


@pytest.mark.parametrize(
    "url", ["redis://h/0?password=secret", "redis://h?db=1", "unix:///s?password=secret", "redis://h#x"]
)
def test_nothing_of_an_address_is_ignored(url: str) -> None:
    (_, text) = problems(None, remote__engine="valkey", valkey__url=url)
    assert "valkey.url: contains ? or #" in text
    assert "secret" not in text


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("10.0.0.1:6379", "; did you mean redis://10.0.0.1:6379?"),
        ("http://10.0.0.1", ""),
        ("redis://", ""),
        ("redis://h:port", ""),
        ("redis://h/name", ""),
        ("redis://h/-1", ""),
        ("redis://h/" + 5000 * "1", ""),
        ("redis://h/1_0", ""),
        ("redis://h/٣", ""),
        ("redis://h:0", ""),
        ("redis:h", ""),
        ("/run/valkey.sock", "; did you mean unix:///run/valkey.sock?"),
        ("unix://", ""),
        ("unix:///", ""),
        ("unix:////", ""),
        ("unix://:99/p", ""),
        ("/", ""),
        ("unix://var/run/valkey.sock", ""),
        ("unix:valkey.sock", ""),
        ("me:secret@h", ""),
    ],
)
def test_an_address_that_the_agent_can_not_use_is_refused(url: str, hint: str) -> None:
    text = problems(None, remote__engine="valkey", valkey__url=url)[1]
    wanted = "valkey.url: must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS), or unix:///PATH"
    assert wanted + hint in text.replace("\n", " ")
    assert hint or "did you mean" not in text
    assert "secret" not in text


# --- paths in any encoding -------------------------------------------------------------------------------------------


def test_a_path_has_the_bytes_that_were_given() -> None:
    """Text of a file is Unicode, and a command line has what Python could not decode as surrogates."""
    for text, found in (("/\u00fc", b"/\xc3\xbc"), ("/\udcc3\udcbc", b"/\xc3\xbc"), ("/\udcff", b"/\xff")):
        assert os.fsencode(checks.absolute_path(text)) == found
    with pytest.raises(ValueError, match="lone surrogate"):
        checks.absolute_path("/\ud800")


def test_a_path_of_a_file_is_read_where_the_locale_is_ascii(tmp_path: Path) -> None:
    """Python decodes file names as ASCII then."""
    path = tmp_path / "c.toml"
    path.write_text('[disk]\nroots = [{ path = "/d\u00fc", capacity = "8MiB" }]\n', encoding="utf-8")
    code = (
        "import os, sys; from pathlib import Path; from kvoffloadd import config; "
        f"sys.stdout.buffer.write(os.fsencode(config.load(Path({str(path)!r})).disk.roots[0].path))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env=environment, check=False, timeout=HANG_S
    )
    assert (done.stdout, done.stderr) == ("/d\u00fc".encode(), b"")


@pytest.mark.parametrize("key", ["remote.directory", "valkey.password_file", "valkey.ca_file"])
def test_what_the_agent_is_told_is_utf8(key: str) -> None:
    assert "must be UTF-8" in problems(None, **{key.replace(".", "__"): "/a\udcff"})[1]
    assert "must be UTF-8" in problems(None, valkey__url="unix:///a\udcff")[1]


@given(st.binary(min_size=1, max_size=40))
def test_a_path_is_shown_as_text_that_can_be_encoded(name: bytes) -> None:
    shown = format_path(os.fsdecode(name))
    assert shown.encode()
    try:
        assert shown == name.decode()
    except UnicodeDecodeError:
        assert "\\x" in shown


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: can't be read: No such file"):
        config.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("memory.capacity_bytes", "8GiB", 8 * GIB),
        ("memory.capacity_bytes", "8192", 8192),
        ("memory.policy", "s3-fifo", "s3-fifo"),
        ("mooncake.master", '"true"', "true"),
        ("server.socket", "/tmp/a b.sock", Path("/tmp/a b.sock")),
        ("server.use_uvloop", "true", True),
        ("server.allowed_uids", "[1, 2]", (1, 2)),
    ],
)
def test_an_override_wins_over_the_file(tmp_path: Path, key: str, text: str, expected: Any) -> None:
    section, name = key.split(".")
    path = write(tmp_path, '[memory]\ncapacity_bytes = 4096\npolicy = "lru"\n')
    assert getattr(getattr(config.load(path, {key: text}), section), name) == expected


@given(st.dictionaries(st.text(max_size=8), st.dictionaries(st.text(max_size=8), st.integers() | st.text())))
def test_no_input_escapes_config_error(tables: dict[str, dict[str, Any]]) -> None:
    overrides = {f"{section}.{key}": str(value) for section, table in tables.items() for key, value in table.items()}
    try:
        config.load(None, overrides)
    except ConfigError as error:
        assert str(error)


# --- pages and nodes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["transparent", "reserved"])
def test_a_pool_file_has_the_pages_of_its_file_system(kind: str) -> None:
    config.load(None, {"memory.huge_pages": kind})
    config.load(None, {"memory.huge_pages": "auto", "memory.pool_file": "/dev/shm/pool"})
    with pytest.raises(ConfigError, match=f'huge_pages = "{kind}": memory.pool_file has the pages of its file system'):
        config.load(None, {"memory.huge_pages": kind, "memory.pool_file": "/dev/shm/pool"})


@pytest.mark.parametrize(("text", "value"), [("auto", "auto"), ("off", "off"), ("[1]", (1,)), ("[2, 0, 2]", (0, 2))])
def test_numa_nodes(text: str, value: object) -> None:
    assert config.load(None, {"memory.numa": text}).memory.numa == value


@pytest.mark.parametrize("text", ["on", "0", "[]", "[-1]", "[true]", '["0"]', "0-1", "true"])
def test_what_are_no_numa_nodes(text: str) -> None:
    with pytest.raises(ConfigError, match=r"memory\.numa = .*: must be \"auto\", \"off\", or a list of NUMA nodes"):
        config.load(None, {"memory.numa": text})


# --- where metrics are scraped --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("localhost:9477", ("127.0.0.1", 9477)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]:65535", ("::1", 65535)),
        ("0.0.0.0:9477", ("0.0.0.0", 9477)),
        ("[::]:9477", ("::", 9477)),
        ("10.0.0.7:9477", ("10.0.0.7", 9477)),
        ("/run/kvoffloadd/metrics.sock", "/run/kvoffloadd/metrics.sock"),
    ],
)
def test_places_of_this_host(text: str, place: object) -> None:
    assert config.load(None, {"metrics.listen": text}).metrics.listen == text
    assert checks.split_address(text) == place


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (":9477", 'must name an address of this host: localhost, 0.0.0.0 or [::]; did you mean "0.0.0.0:9477"'),
        ("example.org:9477", "must name an address of this host: localhost, 0.0.0.0 or [::]"),
        ("10.0.0:9477", "must name an address of this host"),
        ("localhost", "a host and a port"),
        ("localhost:0", "a host and a port"),
        ("localhost:65536", "a host and a port"),
        ("localhost:x", "a host and a port"),
        ("metrics.sock", "an absolute path, or a host"),
        ("/" + 107 * "x", "the path of a socket may have at most 107"),
    ],
)
def test_places_that_are_refused(text: str, reason: str) -> None:
    assert reason in problems(None, metrics__listen=text)[1]
    assert config.load(None).metrics.listen == ""


@pytest.mark.parametrize(
    ("text", "reached"),
    [
        ("", False),
        ("localhost:9477", False),
        ("127.0.0.2:9477", False),
        ("[::1]:9477", False),
        ("/run/kvoffloadd/metrics.sock", False),
        ("0.0.0.0:9477", True),
        ("[::]:9477", True),
        ("10.0.0.7:9477", True),
        ("[fd00::7]:9477", True),
    ],
)
def test_what_other_hosts_can_reach_is_said(text: str, reached: bool) -> None:
    said = list(config.exposures(config.load(None, {"metrics.listen": text})))
    assert len(said) == reached
    assert all(text in one and "without a password" in one and "a firewall or a NetworkPolicy" in one for one in said)


# --- quotas -------------------------------------------------------------------------------------------

QUOTAS = """
[quotas.users.root]
memory_min_bytes = "1GiB"
memory_max_bytes = "2GiB"
[quotas.users.1000]
memory_max_bytes = 4096
[quotas.namespaces."llama-70b#*"]
memory_min_bytes = "512MiB"
"""


def test_quotas_are_read_and_shown(tmp_path: Path) -> None:
    loaded = config.load(write(tmp_path, QUOTAS))
    assert loaded.quotas.users == (QuotaLimits("0", GIB, 2 * GIB), QuotaLimits("1000", 0, 4096))
    assert loaded.quotas.namespaces == (QuotaLimits("llama-70b#*", 512 * MIB),)
    assert config.load(write(tmp_path, config_text(loaded))) == loaded
    assert str(loaded.quotas.users[1]) == "1000 (memory_max_bytes 4 KiB)"
    waits = config.reloaded(loaded, config.load(None))
    assert [line.partition(":")[0] for line in waits[1]][-2:] == ["quotas.users", "quotas.namespaces"]
    assert "quotas.users" not in waits[2]


@pytest.mark.parametrize(
    ("key", "text", "reason"),
    [
        ("users", "7", 'must be tables, like [quotas.users.alice] with memory_max_bytes = "8GiB"'),
        ("users", "{root = 7}", "must be tables, like"),
        ("users", '{no-such-user = {memory_max_bytes = "1GiB"}}', '"no-such-user" is no user of this machine'),
        ("users", '{4294967295 = {memory_max_bytes = "1GiB"}}', '"4294967295" contains 4294967295, which is neither'),
        ("users", '{root = {memory_max_bytes = "1GiB"}, 0 = {memory_max_bytes = "1GiB"}}', '"0" is the same user as'),
        ("users", "{root = {}}", '"root" has no limits; known are memory_min_bytes, memory_max_bytes'),
        ("users", '{root = {memory_maximum_bytes = "1GiB"}}', "did you mean memory_max_bytes?"),
        ("users", "{root = {memory_max_bytes = 0}}", '"root" memory_max_bytes must be from 4 KiB'),
        ("namespaces", '{"a*" = {memory_min_bytes = "1GB"}}', '"a*" memory_min_bytes has the unknown unit "GB"'),
        (
            "namespaces",
            '{"a*" = {memory_min_bytes = "2GiB", memory_max_bytes = "1GiB"}}',
            '"a*" has the memory_min_bytes 2 GiB, more than its memory_max_bytes, 1 GiB',
        ),
    ],
)
def test_a_wrong_quota_is_refused(tmp_path: Path, key: str, text: str, reason: str) -> None:
    heading, problem = problems(write(tmp_path, f"[quotas]\n{key} = {text}\n"))
    assert heading.endswith(": 1 problem:")
    assert problem.startswith(f"  line 2: quotas.{key} = ") and reason in problem


def test_all_minimums_together_fit_into_memory(tmp_path: Path) -> None:
    text = QUOTAS + '[memory]\ncapacity_bytes = "1.5GiB"\n'
    assert config.load(write(tmp_path, text)).memory.capacity_bytes == 1536 * MIB
    (_, problem) = problems(write(tmp_path, text.replace("1.5GiB", "1.25GiB")))
    assert problem.strip() == (
        "quotas: all memory_min_bytes together are 1.50 GiB, more than memory.capacity_bytes, 1.25 GiB"
    )
