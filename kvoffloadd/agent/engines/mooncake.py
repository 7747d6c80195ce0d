"""Mooncake Store as an engine: a client that lends no memory to the cluster.

For versions around 0.3.13; the notes on its calls were measured, or read in its source. It has no deadlines: a transfer
that is given up after a minute goes on in its threads, so only the end of this process ends it. It has no
authentication either, and listens at random ports on all addresses: any peer that reaches them can read and write all
registered memory. So on TCP, which does not need it, nothing is ever registered.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import mmap
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final

from kvoffloadd.agent.engines.base import EngineError, Memory, ObjectTransfer
from kvoffloadd.agent.engines.sidebyside import Readers
from kvoffloadd.agentwire.frames import VALUE_BYTES_MAX, Code, Presence

log = logging.getLogger(__name__)

_PACKAGES: Final = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine-cuda13", "mooncake-transfer-engine")

_ENVIRONMENT: Final = {
    "MC_RPC_TIMEOUT_MS": "300",
    "MC_RPC_CONNECT_TIMEOUT_MS": "300",
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "1",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
"""Mooncake's settings, which it reads as it starts; the agent's environment takes precedence. With its defaults, some
calls last two minutes.
"""

_LENT_BYTES: Final = 0
_STAGING_BYTES: Final = 16 << 20
"""The engine's memory for reading objects that stores have on their disks."""
_MASTER_ANSWERS_S: Final = 2.0
_SURE_S: Final = 30.0
"""A transfer that fails sooner has ended. Mooncake waits for one until its end, or for 60 s (wait_for_completion)."""
_PINNED_COPIES: Final = 3
_READERS: Final = 16
_READ_S: Final = 1.0
"""Within this time a small object arrives, or is FAILED."""
_READ_TOGETHER: Final = 64

_OK: Final = 0
_INVALID: Final = -600
_NOT_FOUND: Final = -704
_ALREADY_THERE: Final = -705
_BAD_CHECKSUM: Final = -801
_TRANSFER_FAILED: Final = -800
_CODES: Final = {
    _NOT_FOUND: Code.MISS,
    -703: Code.NOT_COMPLETE,
    -200: Code.NO_SPACE,
    -707: Code.LEASE_OVER,
    _INVALID: Code.SIZE,  # the object is larger than its place
}
"""Mooncake's final ErrorCodes and their codes here. The meaning of all others depends on their time."""
_PLAIN_PREFIX: Final = re.compile(r"[0-9A-Za-z/._]+")


class MooncakeEngine:
    """Settings: `master` ("HOST:PORT", or "etcd://..." where there are several), `host` (this host's address in the
    cluster's network), `protocol` ("tcp" or "rdma"), `devices` (for rdma, comma-separated; empty: all), `replicas`.

    `store`: the client of the cluster, for tests; otherwise a new `MooncakeDistributedStore`.
    """

    stops_at_once: ClassVar[bool] = False

    def __init__(self, store: Any = None) -> None:
        self._store = store
        self._about = "mooncake"
        self._tcp = True
        self._ordinary: Any = None
        self._pins = _Pins()
        self._small = _SmallPages()
        self._readers = Readers(_READERS)

    def start(self, settings: Mapping[str, Any], memory: Memory) -> None:
        """Joins the cluster. Takes up to five seconds if the master does not answer. Raises EngineError."""
        host, master = str(settings["host"]), str(settings["master"])
        protocol = str(settings.get("protocol", "tcp"))
        self._tcp = protocol == "tcp"
        _check_host(host)
        _check_master(master)
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        store = _imported()
        self._store = self._store or store.MooncakeDistributedStore()
        devices = str(settings.get("devices", ""))
        code = self._store.setup(host, "P2PHANDSHAKE", _LENT_BYTES, _STAGING_BYTES, protocol, devices, master)
        if code != _OK:
            raise EngineError(f"the master at {master} rejects the client at {host} ({code})", fault="store")
        if not self._tcp:
            self._register(memory)
        self._ordinary = store.ReplicateConfig()
        self._ordinary.replica_num = int(settings.get("replicas", 1))
        self._pins.begin(store, max(_PINNED_COPIES, self._ordinary.replica_num))
        self._about = f"{_version()} over {protocol}"

    def _register(self, memory: Memory) -> None:
        """Registers memory, which RDMA needs; with local access only, so that no peer reaches it."""
        for region in (memory.arena, memory.headers):
            if code := self._store.register_buffer(region.address, region.size_bytes):
                raise EngineError(
                    f"{region.size_bytes} bytes can't be registered with the RDMA device ({code}): "
                    "raise the limit of locked memory (LimitMEMLOCK=infinity), and check mooncake.devices",
                    fault="operator",
                )
        self._small.register = self._store.register_buffer

    def about(self) -> str:
        """Returns the package's name and version."""
        return self._about

    def exists(self, names: Sequence[str]) -> list[int]:
        """Makes one call for all, which also renews the leases of the existing objects."""
        known = {0: Presence.NO, 1: Presence.YES}
        return [known.get(found, Presence.UNKNOWN) for found in self._store.batch_is_exist(list(names))]

    def get(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Makes one call for all. A failure of one does not stop the others."""
        began = time.monotonic()
        came = self._store.batch_get_into_multi_buffers(*_columns(transfers))
        failed = self._code_of_failures(time.monotonic() - began)
        # Mooncake's checksum is unnecessary: the header page has one.
        codes = [
            transfer.size_bytes if code == _BAD_CHECKSUM else _checked(code, transfer, failed)
            for transfer, code in zip(transfers, came, strict=True)
        ]
        # An object that is smaller than its place fails like an interrupted transfer.
        if broken := [i for i, code in enumerate(came) if code == _TRANSFER_FAILED and codes[i] == Code.REFUSED]:
            there = self._sizes([transfers[i].name for i in broken])
            for i in broken:
                if there.get(transfers[i].name, transfers[i].size_bytes) != transfers[i].size_bytes:
                    codes[i] = Code.SIZE
        return codes

    def put(self, transfers: Sequence[ObjectTransfer]) -> list[int]:
        """Makes one call for all. Sends nothing for existing objects."""
        began = time.monotonic()
        went = self._store.batch_put_from_multi_buffers(*_columns(transfers), self._ordinary)
        failed = self._code_of_failures(time.monotonic() - began)
        return [
            transfer.size_bytes if code in (_OK, _ALREADY_THERE) else _CODES.get(code, failed)
            for transfer, code in zip(transfers, went, strict=True)
        ]

    def _code_of_failures(self, took_s: float) -> Code:
        """Returns the code for failures of a call that took this long."""
        return Code.REFUSED if self._tcp and took_s < _SURE_S else Code.FAILED

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of objects in the memory of stores. Empty: the master does not report them."""
        found = self._store.batch_get_replica_desc(list(names))
        return {
            name: replicas[0].get_memory_descriptor().buffer_descriptor.size
            for name, replicas in found.items()
            if replicas and replicas[0].is_memory_replica()
        }

    def read(self, names: Sequence[str]) -> list[bytes | int | None]:
        """Makes one call for each store with some of them: an unreachable store fails only after up to a minute."""
        until_s = time.monotonic() + _READ_S
        replicas = self._store.batch_get_replica_desc(list(names))
        if time.monotonic() >= until_s:
            return [Code.FAILED] * len(names)  # the master does not answer: another question would take as long
        lots: dict[str, list[str]] = {}
        for name in replicas:
            if replicas[name]:
                lots.setdefault(_place(replicas[name]), []).append(name)
        described = {name for lot in lots.values() for name in lot}
        others = [name for name in names if name not in described]  # or the master has not answered
        found: dict[str, bytes | int | None] = {}
        for name, presence in zip(others, self.exists(others) if others else (), strict=True):
            found[name] = None if presence == Presence.NO else Code.FAILED
        found |= self._readers.read(lots, self._read_lot, until_s)
        return [found[name] for name in names]

    def _read_lot(self, names: Sequence[str]) -> list[bytes | int | None]:
        values: list[bytes | int | None] = []
        for start in range(0, len(names), _READ_TOGETHER):
            values += self._read_batch(names[start : start + _READ_TOGETHER])
        return values

    def _read_batch(self, names: Sequence[str]) -> list[bytes | int | None]:
        began = time.monotonic()
        with self._small.pages(len(names)) as pages:
            addresses, sizes = [page.address for page in pages], [VALUE_BYTES_MAX] * len(pages)
            codes = self._store.batch_get_into(list(names), addresses, sizes)
            failed = self._code_of_failures(time.monotonic() - began)
            values: list[bytes | int | None] = []
            for page, code in zip(pages, codes, strict=True):
                if code >= 0:
                    values.append(bytes(page.view[:code]))
                else:
                    values.append(None if code == _NOT_FOUND else _CODES.get(code, failed))
                    page.given_up = values[-1] == Code.FAILED
            return values

    def write(self, name: str, value: bytes, *, if_absent: bool, kept_s: float | None) -> int:
        """Refuses an empty object: Mooncake accepts it, and stores nothing."""
        if not 0 < len(value) <= VALUE_BYTES_MAX:
            return Code.REFUSED
        write = self._store.put_from if if_absent else self._store.upsert_from
        with self._small.pages(1) as (page,):
            page.view[: len(value)] = value
            config = self._ordinary if kept_s is None else self._pins.config(kept_s)
            code = write(name, page.address, len(value), config)
            if code == _INVALID and kept_s is not None and self._pins.pin_for_good(kept_s):
                code = write(name, page.address, len(value), self._pins.config(kept_s))
            if code in (_OK, _ALREADY_THERE):
                return len(value)
            page.given_up = True
        return _CODES.get(code, Code.FAILED)

    def renew(self, names: Sequence[str], kept_s: float) -> list[int]:
        """Renews leases only. Only a rewrite makes a pin longer, and the object would be absent meanwhile. An expired
        object can be evicted, but not while clients ask for it: this renews its lease, as each read and lookup does.
        """
        known = {Presence.NO: 0, Presence.YES: 1}
        return [known.get(Presence(presence), Code.FAILED) for presence in self.exists(names)]

    def remove(self, names: Sequence[str]) -> list[int]:
        """Removes by force: leases and hard pins of other clients do not prevent it."""
        codes = self._store.batch_remove(list(names), True)
        return [1 if code == _OK else 0 if code == _NOT_FOUND else _CODES.get(code, Code.REFUSED) for code in codes]

    def sweep(self, prefix: str, after: str) -> tuple[int, str]:
        """Removes names by a regular expression, which the master runs over all names in one step: Mooncake has no
        smaller one, and nothing that lists names. With very many objects this takes long; the client may give up
        before, and the master goes on.
        """
        if not _PLAIN_PREFIX.fullmatch(prefix):
            raise EngineError(f"{prefix!r} is not a prefix of names", fault="daemon")
        removed = int(self._store.remove_by_regex("^" + prefix.replace(".", "[.]"), True))
        return (removed if removed >= 0 else Code.REFUSED), ""

    def close(self) -> None:
        """Does nothing: leaving takes a second, and the process's end does the same."""


def _columns(transfers: Sequence[ObjectTransfer]) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Returns names, addresses and sizes. Raises EngineError for a duplicate name, which Mooncake would mix up."""
    names = [transfer.name for transfer in transfers]
    if len(set(names)) != len(names):
        raise EngineError("a name occurs twice in one call", fault="daemon")
    addresses = [[address for address, _ in transfer.pieces] for transfer in transfers]
    return names, addresses, [[size for _, size in transfer.pieces] for transfer in transfers]


def _checked(code: int, transfer: ObjectTransfer, failed: Code) -> int:
    if code >= 0:
        return code if code == transfer.size_bytes else Code.SIZE
    return _CODES.get(code, failed)


def _place(replicas: Sequence[Any]) -> str:
    """Returns the store to ask for an object: the first one that has it in memory. Empty: it is on a disk."""
    for replica in replicas:
        if replica.is_memory_replica():
            return str(replica.get_memory_descriptor().buffer_descriptor.transport_endpoint)
    return ""


def _imported() -> Any:
    try:
        import mooncake.store
    except ImportError as error:
        raise EngineError(
            f"Mooncake can't be imported: {error}. In a checkout, install '.[remote-mooncake]' for remote.python, and the system's libibverbs (Debian: libibverbs1)",  # noqa: E501
            fault="operator",
        ) from error
    return mooncake.store


def _version() -> str:
    for name in _PACKAGES:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "mooncake of an unknown version"


def _check_host(host: str) -> None:
    """Checks that the address belongs to this host: peers connect to it. Raises EngineError."""
    try:
        (family, kind, number, _, address), *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        with socket.socket(family, kind, number) as probe:
            probe.bind(address)
    except OSError as error:
        raise EngineError(
            f"mooncake.host = {host!r}: not an address of this host: {error.strerror}", fault="operator"
        ) from error


def _check_master(master: str) -> None:
    """Checks that a server listens there, since `setup` does not explain its failures. Raises EngineError."""
    if "://" in master:
        return
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _MASTER_ANSWERS_S).close()
    except ValueError as error:
        raise EngineError(f"mooncake.master = {master!r}: must be HOST:PORT", fault="operator") from error
    except OSError as error:
        raise EngineError(f"the master at {master} does not answer: {error}", fault="store") from error


class _Pins:
    """Keeps small objects by a pin that ends by itself, if the master allows one of that length
    (`--max_kv_soft_pin_ttl`, a day by default); otherwise for good, as nothing else is reliable.
    """

    def __init__(self) -> None:
        self._store: Any = None
        self._copies = 1
        self._for_good = False

    def begin(self, store: Any, copies: int) -> None:
        """`store`: Mooncake's module."""
        self._store, self._copies = store, copies
        self._for_good = not hasattr(store, "SoftPinAction")  # before 0.3.13

    def config(self, kept_s: float) -> Any:
        """Returns the configuration to write an object with."""
        config = self._store.ReplicateConfig()
        config.replica_num = self._copies
        if self._for_good:
            config.with_hard_pin = True
        else:
            config.soft_pin_action = self._store.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = int(kept_s * 1000)
        return config

    def pin_for_good(self, kept_s: float) -> bool:
        """Notes that the master refuses such a pin. Returns whether another one is worth a try."""
        if self._for_good:
            return False
        self._for_good = True
        log.warning(
            "small objects are pinned for good: the master allows no pin of %d h (--max_kv_soft_pin_ttl)",
            int(kept_s // 3600),
        )
        return True


class _SmallPage:
    """Memory for one small object. An abandoned page is never used again: late bytes may still arrive."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, VALUE_BYTES_MAX)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.given_up = False


class _SmallPages:
    """Free pages. Abandoned pages stay mapped as long as the process lives."""

    def __init__(self) -> None:
        self.register: Any = None
        self._lock = threading.Lock()
        self._free: list[_SmallPage] = []
        self._given_up: list[_SmallPage] = []

    @contextmanager
    def pages(self, count: int) -> Iterator[list[_SmallPage]]:
        """Lends this number of pages to the caller. After an exception, none of them is used again."""
        with self._lock:
            taken, self._free = self._free[:count], self._free[count:]
        try:
            while len(taken) < count:
                taken.append(self._make())
            yield taken
        except BaseException:
            for page in taken:
                page.given_up = True
            raise
        finally:
            with self._lock:
                for page in taken:
                    (self._given_up if page.given_up else self._free).append(page)

    def _make(self) -> _SmallPage:
        page = _SmallPage()
        if self.register is not None and self.register(page.address, VALUE_BYTES_MAX):
            raise EngineError("a page can't be registered with the RDMA device", fault="operator")
        return page
