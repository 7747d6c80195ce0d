"""`make bench-peers` without the peers: its pure parts, systems that fail, and all that it asks of kvoffloadd."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.device.copyruns import copy_payloads
from kvoffloadd.testing.disk import disk_folder
from kvoffloadd.testing.process import DaemonError
from scripts.harness import damage
from scripts.peers import cases, pagecache, peers
from scripts.peers.__main__ import order
from scripts.peers.cases import Notes, RunPlan, find_out, flipped_verdict, run_round
from scripts.peers.content import Content
from scripts.peers.figures import BY_NAME, FIGURES, ahead, spread
from scripts.peers.page import page
from scripts.peers.peers import PEERS, Peer, PeerSession, clean_up
from scripts.peers.report import result_of
from scripts.peers.system import ModelGeometry, Prompt

GEOMETRY = ModelGeometry(layers=3, kv_heads=2, head_size=16, block_tokens=16, chunk_tokens=64, blocks=40)
PLAN = RunPlan(tokens=256, jobs=1, asks=2, lookups=(1024, 131_072), chunk_tokens=256, threads=1, disk=None)
FIGURE_NAMES = {figure.name for figure in FIGURES}
LOOKUPS = {"lookup_1k", "lookup_128k", "miss_128k"}


def fake(fault: str = "") -> Peer:
    return Peer("fake", "a fake", "tests.scripts.fakepeer", "Fake", arguments={"fault": fault})


def had_of(peer: Peer) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Samples and notes of one round."""
    samples: dict[str, list[float]] = {}
    notes = Notes()
    run_round(peer, PLAN, samples, notes)
    return samples, notes.said


# --- bytes ---


def test_every_byte_of_a_prompt_is_compared() -> None:
    content, rng = Content(GEOMETRY), np.random.default_rng(5)
    memory = [np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8) for _ in range(GEOMETRY.layers)]
    prompt = Prompt(1, 256, GEOMETRY.chunk_tokens)
    blocks = rng.permutation(GEOMETRY.blocks)[:16]
    content.write(memory, prompt, blocks)
    assert content.wrong(memory, prompt, blocks) == 0
    assert content.wrong(memory, Prompt(2, 256, GEOMETRY.chunk_tokens), blocks) == 16
    assert content.wrong(memory, prompt, blocks[::-1].copy()) == 16
    for _ in range(200):
        layer, at = rng.integers(GEOMETRY.layers), (blocks[rng.integers(16)], rng.integers(GEOMETRY.block_bytes))
        memory[layer][at] ^= np.uint8(1 << rng.integers(8))
        assert content.wrong(memory, prompt, blocks) == 1
        content.write(memory, prompt, blocks)
    content.scramble(memory)
    assert content.wrong(memory, prompt, blocks) == 16


def test_a_needle_is_in_its_chunk_alone() -> None:
    content = Content(GEOMETRY)
    memory = [np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8) for _ in range(GEOMETRY.layers)]
    prompts = [Prompt(number, 256, GEOMETRY.chunk_tokens) for number in (1, 2)]
    for prompt, blocks in zip(prompts, np.arange(32).reshape(2, 16), strict=True):
        content.write(memory, prompt, blocks)
    everything = b"".join(layer.tobytes() for layer in memory)
    needles = [content.needle(prompt, chunk) for prompt in prompts for chunk in range(prompt.chunks)]
    assert len(set(needles)) == 8
    for at, needle in enumerate(needles):
        assert everything.count(needle) == 1
        assert everything.index(needle) == at * GEOMETRY.chunk_blocks * GEOMETRY.block_bytes


def test_names_tell_all_tokens_before() -> None:
    prompt, other = Prompt(1, 1024, 256), Prompt(2, 1024, 256)
    assert prompt.names == Prompt(1, 1024, 256).names
    assert len(prompt.token_ids) == 1024
    assert len({*prompt.names, *other.names}) == 8
    assert {len(name) for name in prompt.names} == {32}


# --- flipped bits ---


def test_a_bit_is_flipped_wherever_files_hold_the_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where two pieces that are read meet."""
    monkeypatch.setattr(damage, "_PIECE_BYTES", 1024)
    needle = bytes(range(100, 164))
    filled = bytearray(8192)
    places = (0, 1024 - 10, 3072, 8192 - 64)
    for at in places:
        filled[at : at + 64] = needle
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "file").write_bytes(filled)
    (tmp_path / "other").write_bytes(bytes(100))
    assert damage.flip_in_files(tmp_path, needle) == len(places)
    found = (tmp_path / "below" / "file").read_bytes()
    assert [at for at in range(8192) if found[at] != filled[at]] == [at + 32 for at in places]
    assert damage.flip_in_files(tmp_path, needle) == 0


_HOLDER = """
import mmap, sys
private, shared = bytearray(8192), mmap.mmap(-1, 8192)
for memory in (private, shared):
    memory[100:164] = bytes(range(100, 132)) + bytes(range(60, 92))
print("ready", flush=True)
sys.stdin.readline()
print(private[100:164].hex(), shared[100:164].hex(), flush=True)
"""


def test_a_bit_is_flipped_in_another_process() -> None:
    needle = bytes(range(100, 132)) + bytes(range(60, 92))
    with subprocess.Popen([sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin and holder.stdout
        assert holder.stdout.readline() == b"ready\n"
        try:
            flipped = damage.flip_in_memory(holder.pid, needle)
        except PermissionError as error:
            pytest.skip(f"this kernel does not allow it: {error}")
        finally:
            holder.stdin.write(b"\n")
            holder.stdin.close()
        contents = [bytes.fromhex(word) for word in holder.stdout.readline().decode().split()]
    assert flipped >= 2
    for found in contents:
        assert [at for at in range(64) if found[at] != needle[at]] == [32]


@pytest.mark.slow
def test_of_this_process_shared_memory_alone_is_flipped() -> None:
    needle = os.urandom(64)
    with mmap.mmap(-1, 8192) as shared:
        shared[100:164] = needle
        try:
            assert damage.flip_in_memory(os.getpid(), needle) == 1
        except PermissionError as error:
            pytest.skip(f"this kernel does not allow it: {error}")
        assert shared[132] == needle[32] ^ 0x40
    assert damage.flip_in_memory(os.getpid(), needle) == 0


@pytest.mark.parametrize(
    ("loaded", "begin"),
    [
        ({"found": 512, "told": 512, "wrong": 1}, "WRONG BYTES"),
        ({"found": 512, "told": 512, "wrong": 0}, "all tokens loaded, all bytes right"),
        ({"found": 512, "told": 256, "wrong": 0}, "512 tokens found, 256 loaded"),
        ({"found": 256, "told": 256, "wrong": 0}, "a miss from there on: 256 of 512"),
    ],
)
def test_what_is_said_of_a_flipped_bit(loaded: dict[str, Any], begin: str) -> None:
    assert flipped_verdict(loaded, 512).startswith(begin)


# --- the page cache ---


def test_what_is_in_the_page_cache() -> None:
    """The files are on a real disk: files that are memory are always in it."""
    with disk_folder(None) as name:
        folder, size = Path(name), 64 * mmap.PAGESIZE
        assert pagecache.cached_share(folder) == 0
        (folder / "below").mkdir()
        (folder / "below" / "file").write_bytes(bytes(size))
        (folder / "empty").touch()
        (folder / "link").symlink_to("below/file")
        assert pagecache.cached_share(folder) == 1
        pagecache.drop(folder)
        assert pagecache.cached_share(folder) == 0
        (folder / "other").write_bytes(bytes(size))
        assert pagecache.cached_share(folder) == 0.5


# --- figures and the page ---


def test_figures_in_their_units() -> None:
    assert [BY_NAME[name].shown(0.012345) for name in ("ping", "miss_128k", "restart")] == ["12,345", "12.3", "0.0123"]
    assert BY_NAME["store"].shown(1.5e9) == "1.5"
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "least": 1.0, "most": 3.0, "rounds": 3}


def test_who_is_ahead() -> None:
    """More bytes a second, and fewer seconds, are better, by medians; a figure that only one has puts none ahead."""
    figures = {
        "kvoffloadd": {"store": spread([2e9]), "ping": spread([20e-6]), "load": spread([1e9]), "restart": spread([1])},
        "a": {"store": spread([1e9]), "ping": spread([10e-6]), "load": spread([3e9])},
        "b": {"store": spread([1e9, 1e9, 9e9]), "ping": spread([40e-6]), "load": spread([2e9]), "read": spread([9e9])},
    }
    leaders = {figure.name: (who, factor) for figure, who, factor in ahead("kvoffloadd", figures)}
    assert leaders == {"ping": ("a", 2.0), "load": ("a", 3.0)}


def test_each_system_is_the_first_in_turn() -> None:
    names = [[peer.name for peer in order(PEERS, number)] for number in range(len(PEERS))]
    assert {one[0] for one in names} == {peer.name for peer in PEERS}
    assert all(sorted(one) == sorted(names[0]) for one in names)


def test_the_page_is_what_was_measured() -> None:
    """Whatever the figures are, they are on the page, and so is what kvoffloadd lacks."""
    systems = PEERS[:2]
    found = {
        "machine": {"processor": "one", "date": "2026-01-02"},
        "samples": {
            "kvoffloadd": {"store": [4.56e9, 4.57e9, 4.58e9], "load": [3.21e9]},
            "lmcache": {"store": [1.23e9], "load": [9.63e9]},
        },
        "notes": {"kvoffloadd": {}, "lmcache": {"read": "not compared: because | so"}},
        "facts": {"kvoffloadd": {"full memory": "it forgets"}, "lmcache": {}},
        "versions": {"kvoffloadd": {"kvoffloadd": "9.9"}, "lmcache": {"lmcache": "8.8", "torch": "7.7"}},
    }
    text = page(json.loads(json.dumps(result_of(PLAN, systems, 3, "python -m scripts peers", found))))
    for expected in (
        "# kvoffloadd beside its peers, 2026-01-02",
        "| store | GB/s | 4.57 (4.56 to 4.58) | 1.23 (1.23 to 1.23) |",
        "- load: LMCache, engine copies, 3.00 times",
        "| read | LMCache, engine copies | not compared: because / so |",
        "| full memory | kvoffloadd | it forgets |",
        "| LMCache, engine copies | lmcache 8.8, torch 7.7 |",
    ):
        assert expected in text
    assert "restart in order" not in text
    assert "- store:" not in text


# --- systems ---


@pytest.mark.slow
def test_a_round_of_a_system_that_does_its_work() -> None:
    samples, notes = had_of(fake())
    assert samples.keys() == LOOKUPS | {"start", "store", "load", "write", "read", "restart", "restart_killed"}
    assert all(len(values) == 1 and values[0] > 0 for values in samples.values())
    assert notes == {"ping": "not compared: there is nobody"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "case", "begin"),
    [
        ("wrong", "memory", "error: WRONG BYTES among 256 tokens"),
        ("wrong", "read", "error: WRONG BYTES among 256 tokens"),
        ("raises", "memory", "error: ValueError: it is broken and the reason"),
        ("refuses", "lookups", "error: a prompt of 1024 tokens was not stored"),
        ("dies", "memory", "it has ended, or does not answer"),
        ("forgets", "restart", "error: of 256 tokens 0 were found and 0 loaded"),
    ],
)
def test_a_system_that_fails_has_no_figure_and_the_reason_is_told(
    fault: str, case: str, begin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "AGAIN_S", 0.1)
    samples, notes = had_of(fake(fault))
    assert notes[case].startswith(begin)
    assert "log" not in notes[case], "but for its last line"
    lacks = {"memory": "load", "read": "read", "lookups": "lookup_1k", "restart": "restart"}[case]
    assert lacks not in samples


@pytest.mark.slow
def test_kvoffloadd() -> None:
    """All that its peers are asked, with little of it: every figure, and what it does is what its documents say."""
    peer = PEERS[0]
    samples, notes = had_of(peer)
    assert notes == {}
    assert samples.keys() == LOOKUPS | (FIGURE_NAMES - {name for name in FIGURE_NAMES if name.startswith("lookup")})
    found = find_out(peer, PLAN)
    assert found["full memory"].endswith("all bytes right")
    assert found["restart, memory alone"].count("256 of 256 tokens, all bytes right") == 2
    assert found["flipped bit on disk"] == "a miss from there on: 0 of 256 tokens, all bytes right"
    if not found["flipped bit in memory, checksums on"].startswith("not compared: this kernel"):
        assert found["flipped bit in memory, checksums on"].endswith("all bytes right")
        assert "0 loaded" in found["flipped bit in memory, checksums on"]
        # As shipped, a load verifies where it can hash while it copies; where it can't, nothing does.
        if copy_payloads is not None:
            assert found["flipped bit in memory"] == found["flipped bit in memory, checksums on"]
        else:
            assert found["flipped bit in memory"].startswith("WRONG BYTES")


def test_shared_memory_of_an_engine_that_has_ended_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_SHARED_MEMORY", tmp_path)
    gone = ["lmcache_kv_12_0", "bench-peers-12", "vllm_offload_bench-peers-12-1.mmap"]
    kept = ["lmcache_kv_123_0", "bench-peers-1", "another-bench-peers-12", "lmcache_kv_1_12"]
    for name in (*gone, *kept):
        (tmp_path / name).touch()
    clean_up(12)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_a_system_that_has_died_can_be_asked_no_more() -> None:
    """Each further question is answered so, and its session ends all the same."""
    with PeerSession(fake("dies"), PLAN.model, PLAN.sizes(1), disk=None, on_disk=False) as session:
        session.ask("store", number=0, tokens=256)
        with pytest.raises(DaemonError):
            session.ask("load", number=0, tokens=256)
        os.waitid(os.P_PID, session.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(DaemonError):
            session.ask("load", number=0, tokens=256)
