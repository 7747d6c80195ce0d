"""Tests the script that asks for the most that is legal: it runs, prints its findings, and jobs keep its bound."""

from __future__ import annotations

import re
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from kvoffloadd.protocol.messages import REQUESTS
from kvoffloadd.server import listener
from kvoffloadd.testing.wait import HANG_S
from scripts.extremes import scene
from scripts.extremes.__main__ import ALL, median
from scripts.extremes.scene import Scene
from scripts.harness.peer import frame
from tests.scripts.running import run_script

CASES = (
    "lookup_of_held_keys",
    "store_and_load_of_160_layers",
    "jobs_of_four_million_runs",
    "drains_of_a_thousand_jobs",
)
TURN_CPU_MAX_S = 0.1
"""Ten times the bound: planning all descriptors of one of these jobs in one turn takes ten times as long as this."""


def test_every_request_has_a_case() -> None:
    """Those that need a GPU are left out."""
    asked = {tag for case in ALL for tag in re.split(", ", case.requests)}
    assert set(REQUESTS) - asked == {"attach_ipc", "attach_vmm"}
    assert len({case.name for case in ALL}) == len(ALL)


def test_the_median_of_the_runs_is_told_and_what_took_longest_in_it() -> None:
    turns = {3.0: "third", 1.0: "first", 2.0: "second"}
    runs = [{"turn_s": turn, "part": part, "wait_s": 10 - turn, "took_s": turn} for turn, part in turns.items()]
    assert median(ALL[0], runs) == {
        "requests": ALL[0].requests, "size": ALL[0].size, "turn_s": 2.0, "part": "second", "wait_s": 8.0, "took_s": 2.0
    }  # fmt: skip


class Door:
    """Answers each connection to a socket with the next of these bytes, and closes it."""

    def __init__(self, path: Path, *answers: bytes) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self.left = list(answers)
        self.scene = Scene(path, path, np.random.default_rng(0))
        self._thread = threading.Thread(target=self._answer)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.scene.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(HANG_S)
        self._listener.close()

    def _answer(self) -> None:
        with suppress(OSError):  # the test has ended
            while True:
                peer, _ = self._listener.accept()
                peer.sendall(self.left.pop(0))
                peer.close()


WELCOME = frame({"type": "welcome", "seq": 1})


def test_a_session_waits_while_its_user_connects_too_often(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "REFUSED_S", 0.0)
    with Door(socket_dir / "kvo.sock", listener._TOO_OFTEN, listener._TOO_OFTEN, WELCOME) as door:
        peer = door.scene.session()
        assert door.left == []
        assert door.scene._open == [peer], "those that were refused are closed"


@pytest.mark.parametrize(
    "refusal",
    [
        {"type": "error", "seq": 0, "code": "forbidden", "message": "this user connects too often", "fault": "client"},
        {"type": "error", "seq": 0, "code": "busy", "message": "no threads for uid 7", "fault": "client"},
        {"type": "error", "seq": 1, "code": "busy", "message": "this user connects too often", "fault": "client"},
    ],
)
def test_another_refusal_is_not_waited_for(socket_dir: Path, refusal: dict[str, object]) -> None:
    with Door(socket_dir / "kvo.sock", frame(refusal), WELCOME) as door:
        with pytest.raises(AssertionError):
            door.scene.session()
        assert door.left == [WELCOME]
        (peer,) = door.scene._open
        door.scene.close()
        assert peer.fileno() == -1


@pytest.mark.slow
def test_jobs_keep_the_loop_turning() -> None:
    chosen = [word for case in CASES for word in ("--case", case)]
    done = run_script("legal_extremes", "--keys", "16384", *chosen)
    assert done.status == 0, done.said
    assert set(done.figures["cases"]) == set(CASES)
    assert {bound["what"].partition(",")[0] for bound in done.figures["bounds"]} == set(CASES)
    for name, case in done.figures["cases"].items():
        assert 0 < case["part_s"] <= case["turn_s"] < TURN_CPU_MAX_S, name
        assert case["part"], "what took longest"


@pytest.mark.slow
def test_wrong_options_are_refused() -> None:
    assert run_script("legal_extremes", "--keys", "5").status == 2
    assert run_script("legal_extremes", "--case", "none").status == 2
    assert run_script("legal_extremes", "--runs", "0").status == 2
