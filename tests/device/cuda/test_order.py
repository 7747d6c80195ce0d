"""Tests the order in which the driver learns that sources may be read."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

from kvoffloadd.device.cuda.driver import Driver
from kvoffloadd.device.pitched import Pitched
from kvoffloadd.device.plan import Copies
from kvoffloadd.model import U64Array
from tests.softcuda.gpu import address, allocate, extras, new_stream, registered, start
from tests.softcuda.running import result

SIZE = 1 << 16


def array(*numbers: int) -> U64Array:
    return np.array(numbers, np.uint64)


def sources() -> str:
    """Changes the source behind a slow copy: what batches, and batches of runs, have copied, final or not."""
    start()
    device, host, stream, copier = allocate(SIZE), registered(SIZE), new_stream(), Driver()
    whole = array(address(host)), array(device), array(SIZE)
    rest = Copies(array(), array(), array(), 0)
    pitch = array(1024)
    runs = Pitched(whole[0], whole[1], pitch, array(SIZE // 1024), pitch, pitch, rest)
    seen = []
    for final in (True, False):
        for in_runs in (False, True):
            host[:] = 1
            extras().delay(stream, 0.05)
            if in_runs:
                assert copier.copy_pitched_batch(runs, 8, stream, sources_final=final) == 0
            else:
                assert copier.copy_batch(*whole, stream, sources_final=final) == 0
            host[:] = 2
            copier.call("cuStreamSynchronize", stream)
            seen.append(ctypes.string_at(device, 1)[0])
    return "".join(map(str, seen))


def test_only_sources_that_are_final_may_be_read_before_their_turn() -> None:
    """A store reads what a worker's kernel may still write: in the stream's order, in each kind of batch."""
    assert result(sources, "read_early") == "1122"
