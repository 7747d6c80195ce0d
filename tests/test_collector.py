"""Tests in separate processes when Python's garbage collector looks at all objects."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvoffloadd.scheduling import collector as module
from kvoffloadd.scheduling.collector import PAUSE_S, Collector
from kvoffloadd.testing.process import ROOT

MANY = """
import gc
from kvoffloadd.scheduling.collector import Collector
gc.set_threshold({young}, 10)
if {starts}:
    Collector().start()
looks = []
gc.callbacks.append(lambda phase, about: looks.append(about["generation"]))
kept = [[number] for number in range({number})]
print(sorted(set(looks)), gc.get_freeze_count() > 0)
"""


def looked_at(number: int, *, starts: bool, young: int = 700) -> str:
    code = MANY.replace("{starts}", str(starts)).replace("{number}", str(number)).replace("{young}", str(young))
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="looks at some of the old objects each time")
def test_making_objects_seldom_looks_at_all_of_them() -> None:
    assert looked_at(400_000, starts=True) == "[0, 1] True"
    assert looked_at(400_000, starts=False) == "[0, 1, 2] False"
    often = looked_at(400_000, starts=True, young=10)  # so that seldom comes soon
    assert often == "[0, 1, 2] True", "a loop that is never idle keeps no garbage for ever"


def test_all_are_looked_at_when_nothing_is_to_do_and_not_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = [1000.0], [0]

    class Fake:
        monotonic = staticmethod(lambda: now[0])
        get_threshold = staticmethod(lambda: (1, 2, 3))
        freeze = staticmethod(lambda: None)
        set_threshold = staticmethod(lambda *_: None)

        @staticmethod
        def collect() -> None:
            looks[0] += 1

    monkeypatch.setattr(module, "gc", Fake)
    monkeypatch.setattr(module, "time", Fake)
    collector = Collector()
    collector.start()
    assert looks == [1]
    collector.on_idle()
    assert looks == [1]
    now[0] += PAUSE_S
    collector.on_idle()
    collector.on_idle()
    assert looks == [2]
    now[0] += PAUSE_S
    collector.on_idle()
    assert looks == [3]
