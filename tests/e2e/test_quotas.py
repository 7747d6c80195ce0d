"""Quotas through the socket: of users and namespaces, after a reload and after restarts, and what is told of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Client, KeyState, NamespaceSpec
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.conftest import OTHER_UID
from tests.e2e.rank import PAGE, Keys, Rank, new_keys
from tests.e2e.users import Stranger, needs_root

SLOTS = 256
UID = os.getuid()
Start = Callable[..., Daemon]


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "kvoffloadd.toml"


def namespace_of(model: str) -> NamespaceSpec:
    return NamespaceSpec(model=model)


def rank_of(daemon: Daemon, model: str) -> Rank:
    rank: Rank = daemon.welcome(Rank(daemon.socket, num_blocks=SLOTS, namespace=namespace_of(model)))
    return rank


def quota(daemon: Daemon, name: str) -> dict[str, Any]:
    return next(row for row in daemon.status()["quotas"] if row["name"] == name)


def hits(rank: Rank, keys: Keys) -> int:
    (states,) = rank.client.lookup({0: keys}).states
    return int(np.count_nonzero(states == KeyState.HIT))


def test_namespaces_keep_their_minimum_and_stay_within_their_maximum(
    start_daemon: Start, config: Path, rng: np.random.Generator
) -> None:
    config.write_text(
        '[quotas.namespaces."llama*"]\nmemory_min_bytes = "256KiB"\n'
        '[quotas.namespaces."qwen*"]\nmemory_max_bytes = "128KiB"\n'
    )
    daemon = start_daemon(memory="1MiB", options=("--config", str(config)))
    llama, qwen, other = (rank_of(daemon, model) for model in ("llama", "qwen", "mistral"))
    kept = new_keys(rng, 64)
    llama.store_keys(kept)
    for _ in range(12):
        qwen.store_keys(new_keys(rng, 24))
        other.store_keys(new_keys(rng, 64))
    assert hits(llama, kept) == 64
    last = new_keys(rng, 32)
    qwen.store_keys(last)
    assert hits(qwen, last) == 32
    rows = {row["name"]: row for row in daemon.status()["quotas"]}
    assert rows["llama*"]["memory_bytes"] == 64 * PAGE and rows["qwen*"]["memory_bytes"] <= 32 * PAGE
    assert rows["qwen*"]["keys_evicted"] > 200 and rows["qwen*"]["keys_refused"] == 0
    many = new_keys(rng, 48)
    assert hits(qwen, many) == 0
    job = qwen.client.store(qwen.registration, {0: (many, qwen.blocks_of(0, 0, 48))})
    done = qwen.client.wait(job, HANG_S)
    assert "no space" in done.reason, "a store is no error, and says for how many keys there was no space"
    assert hits(qwen, many) == 32 and quota(daemon, "qwen*")["keys_refused"] == 16


def test_a_reload_changes_quotas_and_evicts_what_is_beyond(
    start_daemon: Start, config: Path, rng: np.random.Generator
) -> None:
    config.write_text("")
    daemon = start_daemon(memory="1MiB", options=("--config", str(config)))
    rank, other = rank_of(daemon, "llama"), rank_of(daemon, "qwen")
    keys, theirs = new_keys(rng, 100), new_keys(rng, 100)
    rank.store_keys(keys)
    other.store_keys(theirs)
    assert daemon.status()["quotas"] == []
    config.write_text('[quotas.namespaces."llama#*"]\nmemory_max_bytes = "64KiB"\n')
    daemon.signal(signal.SIGHUP)
    until(lambda: daemon.status()["quotas"], "there are quotas", HANG_S)
    until(lambda: quota(daemon, "llama#*")["memory_bytes"] == 16 * PAGE, "what is beyond has gone", HANG_S)
    assert hits(rank, keys) == 16 and hits(other, theirs) == 100
    config.write_text(f"[quotas.users.{UID}]\nmemory_max_bytes = '200KiB'\n")
    daemon.signal(signal.SIGHUP)
    until(lambda: [row["kind"] for row in daemon.status()["quotas"]] == ["user"], "it is another quota", HANG_S)
    until(lambda: quota(daemon, str(UID))["memory_bytes"] == 50 * PAGE, "what is beyond has gone", HANG_S)


def test_a_restart_from_memory_or_disk_goes_on_within_a_lower_maximum(
    start_daemon: Start, tmp_path: Path, config: Path, rng: np.random.Generator
) -> None:
    """What is read from there counts like what is stored."""
    config.write_text("")
    settings = (
        f"memory.pool_file={tmp_path / 'pool'}",
        f'disk.roots=[{{ path = "{tmp_path / "disk"}", capacity = "16MiB" }}]',
        "disk.min_free_bytes=0",
    )
    daemon = start_daemon(*settings, memory="1MiB", options=("--config", str(config)))
    rank = rank_of(daemon, "llama")
    keys = new_keys(rng, 60)
    rank.store_keys(keys)
    until(lambda: daemon.status()["disk"]["keys"] == 60, "all is on disk", HANG_S)
    config.write_text(f"[quotas.users.{UID}]\nmemory_max_bytes = '64KiB'\n")
    daemon.stop()
    daemon.start()
    assert quota(daemon, str(UID))["memory_bytes"] == 16 * PAGE
    rank = rank_of(daemon, "llama")
    rank.client.wait_ready(rank.client.pin({0: keys}), HANG_S)
    assert quota(daemon, str(UID))["memory_bytes"] <= 16 * PAGE
    daemon.stop()
    (tmp_path / "pool").unlink()
    daemon.start()
    rank = rank_of(daemon, "llama")
    rank.client.wait_ready(rank.client.pin({0: keys}), HANG_S)
    assert quota(daemon, str(UID))["memory_bytes"] == 16 * PAGE


@needs_root
def test_a_stranger_takes_no_more_than_the_quota_and_sees_only_it(
    start_daemon: Start, config: Path, rng: np.random.Generator
) -> None:
    config.write_text(
        f"[quotas.users.{OTHER_UID}]\nmemory_max_bytes = '64KiB'\n[quotas.users.root]\nmemory_min_bytes = '900KiB'\n"
    )
    daemon = start_daemon(
        f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666", memory="1MiB",
        options=("--config", str(config)),
    )  # fmt: skip
    daemon.socket.parent.chmod(0o755)
    ours = rank_of(daemon, "llama")
    keys = new_keys(rng, 225)
    ours.store_keys(keys)
    peer = daemon.welcome(Stranger.connect(daemon.socket, OTHER_UID)).peer
    peer.hello(role="worker", namespace={"model": "theirs", "salt": "", "key_bytes": 32})
    rows = peer.ok("status")["status"]["quotas"]
    assert [(row["kind"], row["name"], row["memory_max_bytes"]) for row in rows] == [("user", str(OTHER_UID), 1 << 16)]
    assert [row["name"] for row in daemon.status()["quotas"]] == [str(OTHER_UID), "0"]
    assert hits(ours, keys) == 225


def test_what_people_and_prometheus_see(start_daemon: Start, config: Path, rng: np.random.Generator) -> None:
    config.write_text(f"[quotas.users.{UID}]\nmemory_min_bytes = '64KiB'\nmemory_max_bytes = '128KiB'\n")
    daemon = start_daemon(memory="1MiB", options=("--config", str(config)))
    rank = rank_of(daemon, "llama")
    rank.store_keys(new_keys(rng, 16))
    command = [sys.executable, "-m", "kvoffloadd", "status", "--socket", str(daemon.socket)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S).stdout
    assert f"  uid {UID}  64 KiB of at least 64 KiB and at most 128 KiB\n" in shown
    with Client(daemon.socket, namespace=namespace_of("llama"), role="observer") as observer:
        assert observer.status()["quotas"][0]["memory_bytes"] == 16 * PAGE
