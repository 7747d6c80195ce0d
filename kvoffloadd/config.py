"""The daemon's config: a few frozen sections, read from TOML, every value checked once. The environment decides nothing
but the path of a socket that no key names.

config/kvoffloadd.toml explains every key and repeats every default; a test keeps the two equal.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from kvoffloadd import checks, quotalimits, socketpath
from kvoffloadd.agentwire.storeurl import split_store_url
from kvoffloadd.errors import ConfigError
from kvoffloadd.model import PAGE_BYTES
from kvoffloadd.quotalimits import QuotaLimits
from kvoffloadd.suggestion import did_you_mean
from kvoffloadd.units import BYTES_MAX

D = TypeVar("D")
T = TypeVar("T")

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

AUTO = "auto"
"""A value that the daemon determines itself."""

POLICY_NAMES = ("hit-density", "lru", "s3-fifo")
"""The names in `cache.policy.POLICIES`, known here so that a wrong one is reported with all that is wrong."""

ROOT_BYTES_MIN = 4 * MIB
"""The least capacity of a disk root."""

STUCK_RATIO = 1.25
"""The least ratio of `remote.stuck_s` to the deadline of the store's own calls, so that each call ends before the agent
is killed for it, even on a busy machine.
"""


@dataclass(frozen=True, slots=True)
class DiskRoot:
    """A directory of the disk tier, and the bytes that it may hold."""

    path: Path
    capacity_bytes: int


def _disk_roots(value: object) -> tuple[DiskRoot, ...]:
    return tuple(DiskRoot(path, capacity) for path, capacity in checks.sized_paths(ROOT_BYTES_MIN)(value))


def _key(default: D, check: checks.Check[T], *, live: bool = False) -> D | T:
    """A config key: its default, and the check that a value from outside must pass. `live`: a reload may change it."""
    return field(default=default, metadata={"check": check, "live": live})


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The socket, the users that may connect, and the life of the process."""

    socket: Path = _key(socketpath.SERVICE_SOCKET, checks.socket_path)
    socket_mode: int = _key(0o660, checks.socket_mode)
    allowed_uids: tuple[int, ...] = _key((), checks.uids, live=True)
    partial_frame_s: float = _key(5.0, checks.seconds(0.05, 3600), live=True)
    drain_s: float = _key(10.0, checks.seconds(0, 3600), live=True)
    use_uvloop: bool | str = _key("auto", checks.flag_or_auto)

    @property
    def trials(self) -> Path:
        """Returns the path of the file that records trials with GPUs, next to the socket's lock; see
        `kvoffloadd.device.cuda.trials`.
        """
        return Path(f"{self.socket}.trials")


def suitable_slab_bytes(capacity_bytes: int) -> int:
    """Returns the bytes of a slab for a memory tier of this capacity: 64 slabs, if they are then neither small nor
    large.
    """
    return min(max(capacity_bytes // 64 // PAGE_BYTES * PAGE_BYTES, 8 * MIB), 64 * MIB)


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """The memory tier. `slab_bytes` is cut to `capacity_bytes`; 0: a suitable size. `pool_file`: a path, or empty."""

    capacity_bytes: int = _key(4 * GIB, checks.size(PAGE_BYTES, multiple=PAGE_BYTES))
    slab_bytes: int = _key(0, checks.size(0, 64 * GIB, multiple=PAGE_BYTES))
    policy: str = _key("", checks.choice("", *POLICY_NAMES))
    verify_loads: bool | str = _key(AUTO, checks.flag_or_auto)
    verify_adopted: str = _key("load", checks.choice("load", "start"))
    pool_file: str = _key("", checks.path_or_empty)
    huge_pages: str = _key("auto", checks.choice("auto", "off", "transparent", "reserved"))
    numa: str | tuple[int, ...] = _key("auto", checks.numa_nodes)
    prefault_threads: int = _key(4, checks.count(1, 256))
    hash_threads: int = _key(1, checks.count(1, 64))

    def __post_init__(self) -> None:
        slab_bytes = self.slab_bytes or suitable_slab_bytes(self.capacity_bytes)
        object.__setattr__(self, "slab_bytes", min(slab_bytes, self.capacity_bytes))


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """The disk tier; without roots there is none. `segment_bytes` is cut by the tier to what its roots can hold."""

    roots: tuple[DiskRoot, ...] = _key((), _disk_roots)
    segment_bytes: int = _key(256 * MIB, checks.size(MIB, 16 * GIB, multiple=PAGE_BYTES))
    demote: str = _key("seal", checks.choice("seal", "evict"))
    admit: str = _key("always", checks.choice("always", "second-use"))
    write_bytes_per_s: int = _key(0, checks.size(0))
    write_ops_per_s: int = _key(0, checks.count(0, 1 << 30))
    backlog_bytes: int = _key(GIB, checks.size(PAGE_BYTES))
    read_threads: int = _key(8, checks.count(1, 256))
    write_threads: int = _key(4, checks.count(1, 256))
    direct: bool | str = _key("auto", checks.flag_or_auto)
    min_free_bytes: int = _key(GIB, checks.size(0))
    rewrite_hot: bool = _key(True, checks.flag)
    retry_s: float = _key(5.0, checks.seconds(0.05, 3600))
    stuck_s: float = _key(10.0, checks.seconds(0.1, 3600))
    flush_s: float = _key(10.0, checks.seconds(0, 3600))

    @property
    def on_evict(self) -> bool:
        """Returns whether only keys that memory is about to evict are written."""
        return self.demote == "evict"

    @property
    def second_use(self) -> bool:
        """Returns whether only keys that were used again are written."""
        return self.admit == "second-use"

    @property
    def use_direct(self) -> bool | None:
        """Returns whether files are opened with O_DIRECT; None: where the file system allows it."""
        return None if self.direct == AUTO else bool(self.direct)


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """The remote tier, a store that daemons of several hosts share; without an engine there is none. `inflight_bytes`
    is cut to a sixteenth of memory. "memory" is the engine of tests; its store is a directory of this host.
    """

    engine: str = _key("", checks.choice("", "mooncake", "valkey", "memory", also={"redis": "valkey"}))
    push: str = _key("second-use", checks.choice("second-use", "seal", "evict", "never"))
    python: str = _key("", checks.path_or_empty)
    lookup_s: float = _key(0.03, checks.seconds(0.001, 10))
    fetch_s: float = _key(2.0, checks.seconds(0.01, 600))
    prefetch_s: float = _key(10.0, checks.seconds(0.01, 600))
    stuck_s: float = _key(5.0, checks.seconds(0.1, 600))
    lookup_keys: int = _key(1024, checks.count(1, 4096))
    min_keys: int = _key(4, checks.count(1, 4096))
    inflight_bytes: int = _key(256 * MIB, checks.size(MIB))
    backlog_bytes: int = _key(256 * MIB, checks.size(PAGE_BYTES))
    write_bytes_per_s: int = _key(0, checks.size(0))
    get_threads: int = _key(2, checks.count(1, 64))
    put_threads: int = _key(1, checks.count(1, 64))
    miss_ttl_s: float = _key(1.0, checks.seconds(0, 3600))
    era_poll_s: float = _key(1.0, checks.seconds(0.05, 60))
    directory: str = _key("", checks.text_path_or_empty)


@dataclass(frozen=True, slots=True)
class MooncakeConfig:
    """Mooncake Store, for `remote.engine`."""

    master: str = _key("", checks.name)
    host: str = _key("", checks.name)
    protocol: str = _key("tcp", checks.choice("tcp", "rdma"))
    devices: str = _key("", checks.name)
    replicas: int = _key(1, checks.count(1, 16))


@dataclass(frozen=True, slots=True)
class ValkeyConfig:
    """Valkey or Redis, for `remote.engine`."""

    url: str = _key("", checks.name)
    ttl_s: float = _key(7 * 86_400.0, checks.seconds(1, 366 * 86_400))
    deadline_s: float = _key(4.0, checks.seconds(0.1, 480))
    password_file: str = _key("", checks.text_path_or_empty)
    ca_file: str = _key("", checks.text_path_or_empty)
    cert_file: str = _key("", checks.text_path_or_empty)
    key_file: str = _key("", checks.text_path_or_empty)


@dataclass(frozen=True, slots=True)
class RetainConfig:
    """What clients may claim to be kept for a time: see `kvoffloadd.cache.memory.retention`."""

    memory_share: float = _key(0.25, checks.share(1.0), live=True)
    disk_share: float = _key(0.5, checks.share(0.5), live=True)


@dataclass(frozen=True, slots=True)
class QuotasConfig:
    """What keys of a user, or of namespaces, may take: see `kvoffloadd.cache.memory.quotas`."""

    users: tuple[QuotaLimits, ...] = _key((), quotalimits.of_users, live=True)
    namespaces: tuple[QuotaLimits, ...] = _key((), quotalimits.of_namespaces, live=True)


@dataclass(frozen=True, slots=True)
class CopyConfig:
    """The way in which jobs move bytes."""

    threads: int = _key(2, checks.count(1, 256))
    chunk_bytes: int = _key(64 * MIB, checks.size(64 * KIB, 16 * GIB))
    worker_drain_s: float = _key(10.0, checks.seconds(0.1, 3600))
    deadline_max_s: float = _key(600.0, checks.seconds(0.1, 86_400))
    fill_holes: bool | str = _key("auto", checks.flag_or_auto)


@dataclass(frozen=True, slots=True)
class CudaConfig:
    """GPUs. No library is loaded and no GPU touched before a worker names one."""

    enabled: bool = _key(True, checks.flag)
    batch: bool = _key(True, checks.flag)
    batch_descriptors: int = _key(1024, checks.count(1, 1 << 20))
    pitched_row_bytes: int = _key(27 * KIB, checks.size(0, GIB))
    ipc_uids: tuple[int, ...] = _key((), checks.uids, live=True)
    pin_bytes: int = _key(128 * MIB, checks.size(PAGE_BYTES, 2 * GIB))
    stuck_s: float = _key(30.0, checks.seconds(0.1, 3600))


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    """Caps. The first seven hold for all sessions of one uid together, the others for one session."""

    sessions: int = _key(256, checks.count(1, 65_536), live=True)
    jobs: int = _key(4096, checks.count(1, 1 << 20), live=True)
    job_bytes: int = _key(512 * MIB, checks.size(MIB, TIB), live=True)
    mapped_bytes: int = _key(8 * TIB, checks.size(PAGE_BYTES, BYTES_MAX), live=True)
    fds: int = _key(8192, checks.count(1, 1 << 20), live=True)
    leases: int = _key(1 << 22, checks.count(1, 1 << 28), live=True)
    groups: int = _key(2048, checks.count(1, 1 << 14), live=True)
    jobs_per_session: int = _key(1024, checks.count(1, 1 << 20), live=True)
    outbox_bytes: int = _key(8 * MIB, checks.size(64 * KIB, GIB), live=True)
    events_per_session: int = _key(4096, checks.count(1, 1 << 20), live=True)
    keys_per_request: int = _key(16_384, checks.count(1, 1 << 20), live=True)
    tensors_per_registration: int = _key(8192, checks.count(1, 1 << 16), live=True)

    @property
    def jobs_of_session(self) -> int:
        """Returns the caps of one session: no more than those of all sessions of its uid together."""
        return min(self.jobs_per_session, self.jobs)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The log on standard error, and its format."""

    level: str = _key("info", checks.choice("debug", "info", "warning", "error"), live=True)
    format: str = _key("auto", checks.choice("auto", "console", "journal", "json"), live=True)


EXPOSURE = (
    "every host that can connect reads, without a password, the names of models and disk roots, user ids, and how much "
    "is stored and asked for"
)
"""What metrics show at an address that other hosts can reach."""

NARROW_EXPOSURE = "let only Prometheus connect, by a firewall or a NetworkPolicy"


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """The address where metrics can be scraped; empty: nowhere."""

    listen: str = _key("", checks.listen_address)


@dataclass(frozen=True, slots=True)
class Config:
    """All settings that an operator may choose."""

    server: ServerConfig = field(default_factory=ServerConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
    remote: RemoteConfig = field(default_factory=RemoteConfig)
    mooncake: MooncakeConfig = field(default_factory=MooncakeConfig)
    valkey: ValkeyConfig = field(default_factory=ValkeyConfig)
    retain: RetainConfig = field(default_factory=RetainConfig)
    quotas: QuotasConfig = field(default_factory=QuotasConfig)
    copy: CopyConfig = field(default_factory=CopyConfig)
    cuda: CudaConfig = field(default_factory=CudaConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)


SECTIONS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "server": ServerConfig,
        "memory": MemoryConfig,
        "disk": DiskConfig,
        "remote": RemoteConfig,
        "mooncake": MooncakeConfig,
        "valkey": ValkeyConfig,
        "retain": RetainConfig,
        "quotas": QuotasConfig,
        "copy": CopyConfig,
        "cuda": CudaConfig,
        "limits": LimitsConfig,
        "log": LogConfig,
        "metrics": MetricsConfig,
    }
)


@dataclass(frozen=True, slots=True)
class _Entry:
    """One `section.key = value` from outside, and its place."""

    section: str
    key: str
    value: object
    where: str

    def problem(self, reason: str) -> str:
        shown = json.dumps(self.value, default=str, ensure_ascii=False)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return f"{self.where}: {self.section}.{self.key} = {shown}: {reason}"


def load(
    path: Path | None,
    overrides: Mapping[str, str] = MappingProxyType({}),
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Loads the config from a TOML file (None: defaults only), then applies `overrides` by "section.key".

    An override is text as on a command line: a TOML value, or else plain text ("8GiB", "/run/x.sock"). `environment`:
    the variables that decide where the socket is if no key names it; None: this process's.

    Raises:
        ConfigError: the file can't be read or is no TOML, or any keys or values are wrong: all of them in one message.
    """
    problems: list[str] = []
    values: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    entries = [*(_file_entries(path, problems) if path else ()), *_override_entries(overrides, problems)]
    for entry in entries:
        try:
            values[entry.section][entry.key] = _checked(entry)
        except ValueError as error:
            problems.append(entry.problem(str(error)))
    if not any((entry.section, entry.key) == ("server", "socket") for entry in entries):
        try:
            variables = os.environ if environment is None else environment
            values["server"]["socket"] = socketpath.daemon_socket(variables, os.geteuid())
        except ValueError as error:
            problems.append(str(error))
    config = Config(**{section: SECTIONS[section](**chosen) for section, chosen in values.items()})
    problems += _contradictions(config)
    if problems:
        source = str(path) if path else "options"
        heading = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{source}: {heading}:", *problems]))
    return config


def remarks(config: Config) -> Iterator[str]:
    """Returns what does not apply as written, for the log."""
    limits = config.limits
    if limits.jobs_per_session > limits.jobs:
        yield (
            f"limits.jobs_per_session = {limits.jobs_per_session}: is more than limits.jobs = {limits.jobs}, which is "
            "for all sessions of a uid together"
        )
    if config.memory.capacity_bytes < 2 * config.memory.slab_bytes:
        yield (
            f"memory.slab_bytes = {config.memory.slab_bytes}: all of memory is one slab, whose slots are of one size "
            "at a time: payloads of two sizes, in 4 KiB pages, can't be held together"
        )
    for section, key, store in (("mooncake", "master", config.mooncake.master), ("valkey", "url", config.valkey.url)):
        if store and config.remote.engine != section:
            yield f'{section}.{key}: is not used, since remote.engine is "{config.remote.engine}", not "{section}"'


def exposures(config: Config) -> Iterator[str]:
    """Returns what the config lets other hosts do, for the log and for those who check the file."""
    listen = config.metrics.listen
    if listen and checks.reaches_other_hosts(listen):
        yield f"metrics.listen = {listen}: {EXPOSURE}; {NARROW_EXPOSURE}"


def reloaded(running: Config, wanted: Config) -> tuple[Config, list[str], list[str]]:
    """Returns the config after a reload: from `wanted` what can change while the daemon runs, everything else as in
    `running`.

    Also returns, for people, the changes as "section.key: old -> new", and the keys that differ but need a restart.
    """
    changed, waiting, sections = [], [], {}
    for section in SECTIONS:
        old, new = getattr(running, section), getattr(wanted, section)
        live = {}
        for item in fields(old):
            before, after = getattr(old, item.name), getattr(new, item.name)
            if before == after:
                continue
            if item.metadata["live"]:
                live[item.name] = after
                changed.append(f"{section}.{item.name}: {before} -> {after}")
            else:
                waiting.append(f"{section}.{item.name}")
        sections[section] = replace(old, **live)
    return Config(**sections), changed, waiting


def _checked(entry: _Entry) -> object:
    section = SECTIONS.get(entry.section)
    if section is None:
        raise ValueError(f"unknown section{did_you_mean(entry.section, SECTIONS)}")
    known = {item.name: item.metadata["check"] for item in fields(section)}
    if entry.key not in known:
        raise ValueError(f"unknown key{did_you_mean(entry.key, known)}")
    return known[entry.key](entry.value)


def _file_entries(path: Path, problems: list[str]) -> Iterator[_Entry]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        tables = _parsed(text)
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: byte {error.start}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: is not valid TOML: {error}") from error
    lines = _line_numbers(text)
    for section, table in tables.items():
        if not isinstance(table, dict):
            problems.append(f"{lines.get(('', section), 'top level')}: {section}: keys must be in a [section]")
            continue
        if section not in SECTIONS and not table:
            problems.append(f"[{section}]: unknown section{did_you_mean(section, SECTIONS)}")
        for key, value in table.items():
            yield _Entry(section, key, value, lines.get((section, key), f"section [{section}]"))


def _parsed(text: str) -> dict[str, Any]:
    """Parses TOML. Raises TOMLDecodeError, also for values that the parser can't hold."""
    try:
        parsed = tomllib.loads(text)
        json.dumps(parsed, default=str)  # so that messages can show each value
    except RecursionError:
        raise tomllib.TOMLDecodeError("arrays or tables are nested too deeply") from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise tomllib.TOMLDecodeError("a number has thousands of digits") from None
    return parsed


def _line_numbers(text: str) -> dict[tuple[str, str], str]:
    """Returns the line of each key, only for messages, since tomllib does not report it. Keys in unusual spelling are
    left out.
    """
    found: dict[tuple[str, str], str] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\s*([\w-]+)\s*\]", line):
            section = header[1]
        elif assignment := re.match(r"\s*([\w-]+)\s*=", line):
            found.setdefault((section, assignment[1]), f"line {number}")
    return found


def _override_entries(overrides: Mapping[str, str], problems: list[str]) -> Iterator[_Entry]:
    for dotted, text in overrides.items():
        section, dot, key = dotted.partition(".")
        if not (section and dot and key):
            problems.append(f"override: {dotted}: must have the form section.key")
            continue
        try:
            value: object = _parsed(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        yield _Entry(section, key, value, "override")


def _contradictions(config: Config) -> Iterator[str]:
    """Yields problems that no single value shows."""
    memory = config.memory
    if memory.pool_file and memory.huge_pages in ("transparent", "reserved"):
        yield (
            f'memory.huge_pages = "{memory.huge_pages}": memory.pool_file has the pages of its file system; for huge '
            "pages, use hugetlbfs, or a tmpfs that is mounted with huge=always"
        )
    nobody = socketpath.unmapped_uid()
    for key, uids in (("server.allowed_uids", config.server.allowed_uids), ("cuda.ipc_uids", config.cuda.ipc_uids)):
        if nobody in uids:
            yield f"{key}: {nobody} {socketpath.STANDS_FOR_MANY}: map the user that you mean, and list its number here"
    yield from _remote_contradictions(config)
    yield from quotalimits.contradictions([*config.quotas.users, *config.quotas.namespaces], memory.capacity_bytes)
    # As written, without asking the file system: a link between roots is found when the second root meets the first's
    # lock.
    roots = [Path(os.path.normpath(root.path)) for root in config.disk.roots]
    for one, other in itertools.combinations(roots, 2):
        if one == other:
            yield f"disk.roots: {one} is named twice"
        elif one in other.parents or other in one.parents:
            inner, outer = (other, one) if one in other.parents else (one, other)
            yield f"disk.roots: {inner} lies inside {outer}; each root needs a separate directory"


def _remote_contradictions(config: Config) -> Iterator[str]:
    engine = config.remote.engine
    missing = {
        "mooncake": [key for key in ("master", "host") if not getattr(config.mooncake, key)],
        "valkey": [] if config.valkey.url else ["url"],
        "memory": [],
    }
    for key in missing.get(engine, ()):
        yield f'remote.engine = "{engine}": {engine}.{key} is missing'
    if engine == "memory" and not config.remote.directory:
        yield 'remote.engine = "memory": remote.directory is missing'
    stuck_s, deadline_s = config.remote.stuck_s, config.valkey.deadline_s
    if engine == "valkey" and stuck_s < STUCK_RATIO * deadline_s:
        yield (
            f"remote.stuck_s = {stuck_s:g}: is too short for valkey.deadline_s = {deadline_s:g}: the agent would be "
            f"killed before its calls end by themselves; set stuck_s to {STUCK_RATIO * deadline_s:g} or more, or "
            f"valkey.deadline_s to {stuck_s / STUCK_RATIO:g} or less"
        )
    yield from _store_url_problems(config.valkey.url)


def _store_url_problems(url: str) -> Iterator[str]:
    """Yields what is wrong with an address, without showing it: it may contain a password."""
    if url:
        try:
            split_store_url(url)
        except ValueError as error:
            yield f"valkey.url: {error}{_store_url_hint(url)}"
    if "@" in url and ":" in url.rpartition("@")[0].partition("://")[2]:
        yield "valkey.url: contains a password: put it into a file, and name that file in valkey.password_file"
    if "?" in url or "#" in url:
        yield (
            "valkey.url: contains ? or #, and nothing is read from there: the database is the path, and a password "
            "belongs into the file that valkey.password_file names"
        )


def _store_url_hint(url: str) -> str:
    if ":/" in url or "@" in url:  # before the @ may be a password
        return ""
    meant = f"unix://{url}" if url.startswith("/") else f"redis://{url}"
    try:
        split_store_url(meant)
    except ValueError:
        return ""
    return f"; did you mean {meant}?"
