"""`ready` and `signals` that a daemon may not believe."""

from __future__ import annotations

import pytest

from kvoffloadd.linux.sharedmem import create_memfd
from scripts.harness.peer import Fields
from tests.server.scene import FULL, Scene

SIZE = 4096


@pytest.fixture
def signalling(scene: Scene) -> int:
    """A registration of the scene's tensor with one signal of a page."""
    (signal,) = scene.peer.attach([create_memfd("signal", SIZE)])
    registered = scene.peer.ok("register", tensors=[scene.tensor], groups=[FULL], signals=[signal])
    return int(registered["registration"])


@pytest.mark.parametrize("what", ["store", "load"])
@pytest.mark.parametrize(
    ("code", "words", "ready"),
    [
        ("unknown_name", "has no signal 1 (signals: 1)", {"signal": 1, "offset": 0, "value": 1}),
        ("bad_extent", "no aligned u64", {"signal": 0, "offset": 4, "value": 1}),
        ("bad_extent", "no aligned u64", {"signal": 0, "offset": SIZE, "value": 1}),
        ("bad_extent", "no aligned u64", {"signal": 0, "offset": (1 << 48) - 8, "value": 1}),
        ("bad_message", "ready", {"signal": 0, "offset": 0, "value": 0}),
        ("bad_message", "ready", {"signal": -1, "offset": 0, "value": 1}),
        ("bad_message", "ready", {"signal": 0, "offset": 0, "value": 1 << 62}),
    ],
)
def test_a_place_that_is_none(scene: Scene, signalling: int, what: str, code: str, words: str, ready: Fields) -> None:
    before = scene.daemon.state()
    refusal = scene.peer.refused(code, what, **scene.job(registration=signalling, ready=ready))
    assert words in refusal
    assert scene.daemon.state() == before


def test_a_registration_without_signals_has_none(scene: Scene) -> None:
    ready = {"signal": 0, "offset": 0, "value": 1}
    assert "has no signal 0 (signals: 0)" in scene.peer.refused("unknown_name", "store", **scene.job(ready=ready))


@pytest.mark.parametrize("number", [0, 99])
def test_signals_in_memory_that_is_not_there(unchanged: Scene, number: int) -> None:
    unchanged.peer.refused("unknown_name", "register", tensors=[unchanged.tensor], groups=[FULL], signals=[number])


def test_a_signal_in_the_last_word_counts(scene: Scene, signalling: int) -> None:
    job = scene.job(registration=signalling, ready={"signal": 0, "offset": SIZE - 8, "value": 1}, deadline_s=0.1)
    scene.peer.ok("store", **job)
    assert scene.peer.completed(job["job"])["outcome"] == "expired"


def test_a_daemon_without_cuda_says_so(scene: Scene) -> None:
    refusal = scene.peer.refused("bad_memory", "attach_ipc", device=bytes(16), handles=bytes(64))
    assert "GPU" in refusal or "CUDA" in refusal
    assert scene.peer.ok("ping")


@pytest.mark.parametrize(
    "fields",
    [
        {"device": bytes(15), "handles": bytes(64)},
        {"device": bytes(16), "handles": bytes(63)},
        {"device": bytes(16), "handles": bytes(64 * 65)},
    ],
)
def test_handles_of_a_wrong_size(unchanged: Scene, fields: Fields) -> None:
    unchanged.peer.refused("bad_message", "attach_ipc", **fields)


def test_handles_that_are_no_whole_ones(unchanged: Scene) -> None:
    assert "each has 64" in unchanged.peer.refused("bad_message", "attach_ipc", device=bytes(16), handles=bytes(100))
