"""Claims through the socket: what is claimed stays while everything else is displaced, and ends when it should."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import asdict

from kvoffloadd.client import Client, KeyState, NamespaceSpec
from kvoffloadd.errors import RemoteError, UsageError
from kvoffloadd.testing.wait import HANG_S, until
from scripts.harness.daemon import Daemon
from tests.conftest import OTHER_UID
from tests.e2e.rank import NAMESPACE, Keys, Rank, new_keys
from tests.e2e.users import Stranger, needs_root

SLOTS = 256
SCHEMA = {
    "group": 0, "kind": "full", "tokens_per_key": 16, "window_keys": 0, "blocks_per_key": 1, "parts": 1, "part": 0,
    "refs": [],
}  # fmt: skip
"""Of the rank's group, as a scheduler registers it."""

HIT, MISS = KeyState.HIT, KeyState.MISS


@pytest.fixture
def small(start_daemon: Callable[..., Daemon]) -> Daemon:
    """Room for 256 keys of one page: claims may keep 64 of them."""
    daemon = start_daemon(f"server.allowed_uids=[{OTHER_UID}]", "server.socket_mode=0o666", memory="1MiB")
    daemon.socket.parent.chmod(0o755)
    return daemon


@pytest.fixture
def rank(small: Daemon) -> Rank:
    found: Rank = small.welcome(Rank(small.socket, num_blocks=SLOTS))
    return found


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def flood(rank: Rank, rng: np.random.Generator, turnovers: int) -> None:
    """Stores keys that nobody asks for, in place of all that may go, so often."""
    for _ in range(turnovers * SLOTS // 32):
        rank.store_keys(new_keys(rng, 32))


def counters(daemon: Daemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["retention"]
    return found


def prefixes(rank: Rank, rng: np.random.Generator) -> dict[str, Keys]:
    """Stores 20 prompts of three keys."""
    found = {f"prefix {number}": new_keys(rng, 3) for number in range(20)}
    for keys in found.values():
        rank.store_keys(keys)
    return found


def test_named_prefixes_outlive_ten_turnovers(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    found = prefixes(rank, rng)
    for name, keys in found.items():
        assert rank.client.retain({0: keys}, 600, name=name) == rank.client.retain({0: keys}, 600, name=name)
    flood(rank, rng, 10)
    others = new_keys(rng, SLOTS * 3 // 4)
    rank.store_keys(others)
    for keys in found.values():
        assert rank.states(keys) == [HIT] * 3
        assert rank.loads_right(keys)
    assert rank.states(others).count(HIT) >= SLOTS * 3 // 4 - 1, "others lose at most the share"
    told = counters(small)
    assert (told["claims"], told["memory_keys"], told["memory_bytes"]) == (20, 60, 60 * 4096)
    assert (told["keys_unkept"], told["claims_lapsed"]) == (0, 0)
    until(lambda: all(claim.hits for claim in rank.client.claims()), "each load has been counted", HANG_S)
    for claim in rank.client.claims():
        assert (claim.keys, claim.memory_keys, claim.tokens) == (3, 3, 48)


def test_without_claims_nothing_of_them_is_left(rank: Rank, rng: np.random.Generator) -> None:
    found = prefixes(rank, rng)
    flood(rank, rng, 10)
    for keys in found.values():
        assert rank.states(keys) == [MISS] * 3


def test_a_claim_ends_within_a_second_of_its_time(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    """The later of two ends with a claim that is made again and again between them."""
    keys = new_keys(rng, 8)
    rank.store_keys(keys)
    rank.client.retain({0: keys[4:]}, 600.0, name="moved")
    rank.client.retain({0: keys[:4]}, 1.0)
    for _ in range(200):
        rank.client.retain({}, 600.0, name="moved")
    rank.client.retain({}, 1.5, name="moved")
    began = time.monotonic()
    assert counters(small)["claims"] == 2
    until(lambda: counters(small)["claims"] == 0, "both have ended", HANG_S)
    assert time.monotonic() - began >= 0.9, "not before its time"
    assert counters(small)["claims_expired"] == 2
    flood(rank, rng, 2)
    assert rank.states(keys) == [MISS] * 8


def test_what_ends_a_claim_and_what_does_not(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, 4)
    rank.store_keys(keys)
    rank.client.retain({0: keys}, 600, name="a")
    rank.close()
    again = small.welcome(Rank(small.socket))
    flood(again, rng, 2)
    assert again.states(keys) == [HIT] * 4, "the end of a session ends no claim"
    assert again.client.forget("a").keys == 4
    with pytest.raises(RemoteError, match="no claim is named 'a': it has ended, or was never made"):
        again.client.forget("a")
    again.client.retain({0: keys}, 600, name="b")
    again.client.clear()
    assert not again.client.claims()
    again.store_keys(keys)
    flood(again, rng, 2)
    assert again.states(keys) == [MISS] * 4, "what is stored after a clear is not claimed"
    again.client.retain({0: keys}, 600, name="c")
    small.kill()
    small.start()
    assert not again.client.claims()


def test_requests_that_are_wrong(rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, 2)
    with pytest.raises(RemoteError, match="group 0: a key is claimed twice in one request"):
        rank.client.retain({0: np.concatenate([keys, keys])}, 1.0)
    with pytest.raises(RemoteError, match="no claim is named 'x'"):
        rank.client.retain({}, 1.0, name="x")
    for wrong, why in (
        ({"seconds": 0}, "seconds must be above 0"),
        ({"seconds": 1e9}, "at most 2592000 seconds"),
        ({"seconds": 1, "priority": 101}, "priority must be an integer from 0 to 100"),
        ({"seconds": 1, "name": "x" * 129}, "at most 128 characters"),
    ):
        with pytest.raises(UsageError, match=why):
            rank.client.retain({0: keys}, **wrong)
    for name, number in (("", 0), ("a", 1)):
        with pytest.raises(UsageError, match="needs keys, or the name of claims, or the number of one"):
            rank.client.retain({}, 1.0, name=name, number=number)
        with pytest.raises(UsageError, match="needs the name of claims, or the number of one"):
            rank.client.forget(name, number)
    with pytest.raises(UsageError, match="not both"):
        rank.client.retain({0: keys}, 1.0, number=1)
    with pytest.raises(RemoteError, match="a retain with groups names keys, and no number of a claim"):
        rank.client.retain({0: b""}, 1.0)
    with pytest.raises(RemoteError, match="no claim has the number 77"):
        rank.client.forget(number=77)
    assert not rank.client.claims()


def test_many_claims_are_listed_in_pages(rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, 600)
    for number in range(600):
        rank.client.retain({0: keys[number : number + 1]}, 600, name=f"{number}")
    assert [claim.name for claim in rank.client.claims()] == [f"{number}" for number in range(600)]


def test_the_share_can_be_changed_by_a_reload(
    start_daemon: Callable[..., Daemon], tmp_path: Path, rng: np.random.Generator
) -> None:
    config = tmp_path / "kvoffloadd.toml"
    config.write_text("[retain]\nmemory_share = 0.25\n")
    small = start_daemon(memory="1MiB", options=("--config", str(config)))
    rank = rank_of(small, "e2e")
    keys = new_keys(rng, 64)
    rank.store_keys(keys)
    rank.client.retain({0: keys[:32]}, 600, name="old")
    rank.client.retain({0: keys[32:]}, 600, name="new")
    config.write_text("[retain]\nmemory_share = 0.125\n")
    small.signal(signal.SIGHUP)
    until(lambda: counters(small)["claims"] == 1, "one claim has lapsed", HANG_S)
    assert [claim.name for claim in rank.client.claims()] == ["new"]


# --- who may see and change what ----------------------------------------------------------------------


@needs_root
def test_users_see_their_own_claims_and_root_those_of_all(small: Daemon, rank: Rank, rng: np.random.Generator) -> None:
    keys = new_keys(rng, 4)
    rank.store_keys(keys)
    rank.client.retain({0: keys}, 600, name="shared name")
    own = rank.client.claims()[0].number
    stranger = small.welcome(Stranger.connect(small.socket, OTHER_UID)).peer
    stranger.ok("hello", version=1, role="observer", instance=os.urandom(16), namespace=None)
    assert stranger.ok("claims")["claims"] == []
    for which in ({"name": "shared name"}, {"number": own}):
        assert "no claim" in stranger.refused("unknown_name", "forget", **which)
        assert "no claim" in stranger.refused("unknown_name", "retain", groups=[], seconds=1.0, **which)
    with Client(small.socket, namespace=NAMESPACE, role="observer") as observer:
        with pytest.raises(RemoteError, match="an observer may name claims, but no keys"):
            observer.retain({0: keys}, 1.0)
        assert observer.retain({}, 600.0, name="shared name").claims == 1
    engine = small.welcome(Stranger.connect(small.socket, OTHER_UID)).peer
    engine.hello(role="scheduler", namespace=asdict(NAMESPACE))
    engine.ok("register", tensors=[], groups=[SCHEMA])
    engine.ok("retain", groups=[{"group": 0, "keys": keys.tobytes()}], seconds=60.0, name="theirs")
    (theirs,) = stranger.ok("claims")["claims"]
    assert (theirs["uid"], theirs["name"], theirs["memory_keys"]) == (OTHER_UID, "theirs", 0)
    assert [claim.name for claim in rank.client.claims()] == ["shared name"]
    assert stranger.ok("forget", number=theirs["number"])["claims"] == 1
    with rank_of(small, "other model") as other:
        assert not other.client.claims(), "an engine sees those of its namespace"
        other.client.retain({0: keys}, 600, name="shared name")
        code, told = kvoffloadd(small, "retained", "--json")
        assert (code, [claim["keys"] for claim in json.loads(told)["claims"]]) == (0, [4, 4])
        code, told = kvoffloadd(small, "retain", "shared name", "--for", "2h", "--priority", "80")
        assert (code, told) == (0, "2 claims with 8 keys: 2 h 0 min from now\n")
        code, told = kvoffloadd(small, "retained")
        assert code == 0
        assert told.count("shared name") == 2 and "80" in told
        assert kvoffloadd(small, "forget", "shared name") == (0, "ended 2 claims with 8 keys\n")
        assert kvoffloadd(small, "forget", "shared name")[0] == 4
        assert kvoffloadd(small, "retained") == (0, "claims\n none\n")


def rank_of(daemon: Daemon, model: str) -> Rank:
    found: Rank = daemon.welcome(Rank(daemon.socket, namespace=NamespaceSpec(model=model)))
    return found


def kvoffloadd(daemon: Daemon, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "kvoffloadd", *arguments, "--socket", str(daemon.socket)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    return done.returncode, done.stdout + done.stderr
