"""`scripts stress_holes`: a short run is clean, kills included; what is planted is found, and what is legal is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffloadd.client import Found
from kvoffloadd.model import BoolArray, U8Array
from scripts.harness.counters import Counters
from scripts.harness.daemon import Daemon
from scripts.harness.promises import Findings
from scripts.holes.evidence import Journal
from scripts.holes.memory import WatchedMemory
from scripts.holes.run import can_forbid_holes
from scripts.holes.session import TextSession
from scripts.holes.shapes import SHAPES, cut, fill, forget, page_out, punch, punch_all
from scripts.holes.texts import KEYS, PAYLOAD_BYTES, STRIDE_BYTES, Text, Texts
from tests.scripts.running import run_script

BLOCKS = 2 * KEYS
ALL = np.arange(KEYS)
ALMOST_ALL = 255 / 256
"""Of random bytes, how many are not those of other random bytes."""


def memory_of(*, sealed: bool = True, punched: bool = False) -> WatchedMemory:
    return WatchedMemory("watched", BLOCKS, np.random.default_rng(0), sealed=sealed, punched=punched)


def flip(memory: WatchedMemory, block: int, offset: int) -> None:
    at = block * STRIDE_BYTES + offset
    os.pwrite(memory.fd, bytes([os.pread(memory.fd, 1, at)[0] ^ 1]), at)


def zero(memory: WatchedMemory, block: int) -> None:
    os.pwrite(memory.fd, bytes(STRIDE_BYTES), block * STRIDE_BYTES)


class HolesScene:
    """A session with a daemon; `flips`: blocks that get a flipped bit before the next load is looked at."""

    def __init__(self, daemon: Daemon, folder: Path, *, punched: bool = False) -> None:
        self.folder = folder / "evidence"
        self.counters = Counters(folder / f"counters-{punched}", 1, 0)
        self.texts = Texts(0, 1, 10)
        self.memory = memory_of(punched=punched)
        self.session = TextSession(
            str(daemon.socket), self.texts, self.memory, self.counters, Findings(self.counters),
            Journal(self.folder, "worker"), punched=punched,
        )  # fmt: skip
        daemon.welcome(self.session.client)

    def prompt(self, *, holed: bool = False) -> Text:
        rng = np.random.default_rng(0)
        return self.texts.holed(rng) if holed else self.texts.clean(rng)

    def stored(self, *, holed: bool = False) -> Text:
        prompt = self.prompt(holed=holed)
        self.session.store(prompt, ALL)
        self.session.wait()
        return prompt

    def counted(self, *names: str) -> list[int]:
        return [self.counters.total(name) for name in names]

    def evidence(self) -> dict[str, Any]:
        (path,) = self.folder.glob("*.json")
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found


VERDICT = ("verified_loads", "wrong_bytes", "stray_bytes", "broken_promises")


@pytest.fixture
def scene(start_daemon: Callable[..., Daemon], tmp_path: Path) -> HolesScene:
    return HolesScene(start_daemon(), tmp_path)


# --- loads ---


def test_a_right_load_is_verified(scene: HolesScene) -> None:
    prompt = scene.stored()
    found: Found = scene.session.pin(prompt, patient=True)
    scene.session.load(prompt, ALL, lease=found.lease)
    scene.session.wait()
    assert scene.counted(*VERDICT) == [1, 0, 0, 0]
    assert scene.counted("excused_bytes", "missed_keys", "loaded_keys") == [0, 0, KEYS]
    assert not scene.folder.exists()


def test_a_key_that_misses_is_excused_and_a_check_without_states_would_call_it_wrong(scene: HolesScene) -> None:
    scene.session.load(scene.prompt(), ALL)
    scene.session.wait()
    assert scene.counted(*VERDICT) == [0, 0, 0, 0]
    assert scene.counted("missed_keys", "excused_bytes")[0] == KEYS
    assert scene.counted("excused_bytes")[0] == pytest.approx(ALMOST_ALL * KEYS * PAYLOAD_BYTES, rel=0.01)


def test_a_wrong_byte_of_a_hit_is_found_and_written_down(scene: HolesScene) -> None:
    prompt = scene.stored()
    scene.session.load(prompt, ALL)
    (opened,) = scene.session.open
    scene.session.client.wait(opened.job, 60.0)
    block = int(opened.blocks[3])
    flip(scene.memory, block, 1234)
    scene.session.settle()
    assert scene.counted(*VERDICT) == [0, 1, 0, 0]
    evidence = scene.evidence()
    (wrong,) = evidence["blocks"]
    expected = scene.texts.contents(prompt.keys)[3, 1234]
    assert (wrong["block"], wrong["first_offset"], wrong["last_offset"], wrong["wrong_bytes"]) == (block, 1234, 1234, 1)
    assert [bytes.fromhex(wrong[name])[0] for name in ("expected", "seen")] == [expected, expected ^ 1]
    used = wrong["used_for"]
    assert (used["key"], used["prompt"]) == (prompt.keys[3].tobytes().hex(), prompt.number)
    assert (used["state"], used["outcome"], used["valid"]) == ("HIT", "done", True)
    assert [call["call"] for call in evidence["calls"]] == ["store", "ended", "load", "ended"]
    with np.load(scene.folder / "worker-0.npz") as arrays:
        assert arrays[f"seen_{block}"].shape == (STRIDE_BYTES,)


def test_a_byte_that_changes_where_no_load_writes_is_stray(scene: HolesScene) -> None:
    """It is in the block of a key that misses, behind a payload, or in a block that no key names."""
    scene.session.load(scene.prompt(), ALL[:4])
    (opened,) = scene.session.open
    scene.session.client.wait(opened.job, 60.0)
    blocks = opened.blocks.tolist()
    flip(scene.memory, blocks[0], 0)
    flip(scene.memory, blocks[1], PAYLOAD_BYTES)
    flip(scene.memory, next(block for block in range(BLOCKS) if block not in blocks), 5)
    scene.session.settle()
    assert scene.counted(*VERDICT) == [0, 3, 2, 0]
    assert len(scene.evidence()["blocks"]) == 3


@pytest.mark.parametrize("holed", [False, True])
def test_only_of_keys_that_attackers_store_bytes_may_be_0(scene: HolesScene, holed: bool) -> None:
    prompt = scene.stored(holed=holed)
    scene.session.load(prompt, ALL)
    (opened,) = scene.session.open
    scene.session.client.wait(opened.job, 60.0)
    os.pwrite(scene.memory.fd, bytes(PAYLOAD_BYTES), int(opened.blocks[0]) * STRIDE_BYTES)
    scene.session.settle()
    right = scene.counted("wrong_bytes") == [0]
    assert right == holed
    assert scene.counted("verified_loads") == [holed]


@pytest.mark.skipif(not can_forbid_holes(), reason="this kernel fills all holes")
@pytest.mark.parametrize("punched", [True, False])
def test_only_an_attacker_s_jobs_may_meet_a_hole(
    start_daemon: Callable[..., Daemon], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, punched: bool
) -> None:
    scene = HolesScene(start_daemon("copy.fill_holes=false"), tmp_path, punched=punched)
    prompt = scene.stored()
    monkeypatch.setattr(scene.memory, "spoil", lambda _: punch_all(scene.memory, 0, 0))
    scene.session.load(prompt, ALL)
    scene.session.wait()
    assert scene.counted("failed_jobs", "verified_loads") == [punched, 0]
    assert (scene.counted("broken_promises", "wrong_bytes") == [0, 0]) == punched


# --- memory ---


def wrong_in(memory: WatchedMemory) -> list[tuple[int, int, int]]:
    return [(one.block, one.wrong_bytes, one.gap_bytes) for one in memory.compare()]


def test_every_byte_of_a_memory_is_compared_once() -> None:
    memory = memory_of()
    assert wrong_in(memory) == []
    flip(memory, 0, 0)
    flip(memory, BLOCKS - 1, STRIDE_BYTES - 1)
    assert wrong_in(memory) == [(0, 1, 0), (BLOCKS - 1, 1, 1)]
    assert wrong_in(memory) == []


def test_of_a_block_that_is_lent_the_gap_is_compared() -> None:
    memory = memory_of()
    memory.lend(np.array([4]))
    flip(memory, 4, PAYLOAD_BYTES - 1)
    flip(memory, 4, PAYLOAD_BYTES)
    assert wrong_in(memory) == [(4, 1, 1)]
    memory.lend(np.array([4]), False)
    assert wrong_in(memory) == [(4, 1, 0)]


def test_bytes_may_become_0_and_nothing_else_where_holes_are_punched() -> None:
    memory = memory_of(punched=True)
    zero(memory, 2)
    assert wrong_in(memory) == []
    flip(memory, 2, 7)
    assert wrong_in(memory) == [(2, 1, 0)]


def test_a_payload_may_have_holes_until_it_was_compared() -> None:
    memory, block = memory_of(), np.array([1])
    contents: U8Array = np.full((1, PAYLOAD_BYTES), 9, np.uint8)
    memory.write(block, contents)
    memory.expect(block, contents, holed=True)
    zero(memory, 1)
    ((_, wrong_bytes, gap_bytes),) = wrong_in(memory)
    assert wrong_bytes == gap_bytes > 0, "the gap is no payload"
    memory.write(block, contents)
    zero(memory, 1)
    ((_, wrong_bytes, gap_bytes),) = wrong_in(memory)
    assert wrong_bytes == PAYLOAD_BYTES


# --- holes ---


def changed(memory: WatchedMemory, before: U8Array) -> BoolArray:
    now = memory.read()
    differs: BoolArray = now != before
    assert not now[differs].any(), "bytes become 0 or stay"
    return differs


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "unsealed"])
@pytest.mark.parametrize("shape", dict.fromkeys(SHAPES), ids=lambda shape: shape.__name__)
def test_a_shape_makes_zeros_of_what_it_names(shape: Callable[..., None], sealed: bool) -> None:
    memory = memory_of(sealed=sealed)
    before, at, size = memory.read(), 3 * STRIDE_BYTES + 5, 2 * STRIDE_BYTES
    shape(memory, at, size)
    gone = changed(memory, before)
    keeps_all = shape in (forget, page_out, fill) or (shape is cut and sealed)
    assert gone.any() == (not keeps_all)
    if shape is punch:
        assert not gone.reshape(-1)[:at].any()
        assert not gone.reshape(-1)[at + size :].any()
    assert os.fstat(memory.fd).st_size == memory.size_bytes


# --- the script ---


@pytest.mark.slow
def test_a_short_run_beside_holes_is_clean(tmp_path: Path) -> None:
    done = run_script(
        "stress_holes", "--seconds", "6", "--memory", "16MiB", "--seed", "1", "--kill-workers", "--kill-daemon",
        "--evidence", str(tmp_path / "evidence"),
    )  # fmt: skip
    figures = done.figures
    assert (done.status, figures["said"], figures["errors"], figures["findings"]) == (0, [], [], [])
    assert figures["wrong_bytes"] == figures["broken_promises"] == 0
    assert (figures["leaked"], figures["evidence"]) == ([], None)
    assert figures["bystanders"]["verified_loads"] > 0
    assert figures["attackers"]["stores"] > 0
    assert figures["holes"] > 0
    assert sum(figures["mishaps"].values()) > 0
    assert figures["daemon_runs"] > 1
    assert not (tmp_path / "evidence").exists()


@pytest.mark.slow
def test_planted_corruption_is_found_beside_holes(tmp_path: Path) -> None:
    done = run_script(
        "stress_holes", "--seconds", "4", "--seed", "2", "--attackers", "1", "--plant-corruption",
        "--evidence", str(tmp_path / "evidence"),
    )  # fmt: skip
    figures = done.figures
    assert (done.status, figures["good"], figures["evidence"]) == (1, False, str(tmp_path / "evidence"))
    assert 0 < figures["wrong_bytes"] <= figures["faults_planted"]
    evidence = [json.loads(path.read_text(encoding="utf-8")) for path in (tmp_path / "evidence").glob("*.json")]
    blocks = [block for one in evidence for block in one["blocks"]]
    assert blocks
    assert all(block["used_for"]["valid"] for block in blocks)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--bystanders", "0"), "--bystanders"),
        (("--attackers", "-1"), "--attackers"),
        (("--memory", "1MiB"), "--memory"),
        (("--pause", "-1"), "--pause"),
    ],
)
@pytest.mark.slow
def test_wrong_usage_is_told(arguments: tuple[str, ...], named: str) -> None:
    done = run_script("stress_holes", *arguments)
    assert done.status == 2
    assert named in done.said
