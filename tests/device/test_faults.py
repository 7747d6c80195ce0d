"""Planted faults are really there, and come when they should."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from kvoffloadd.device.base import Copy, CopyRequest, CopyResult, Device
from kvoffloadd.device.faults import FaultyDevice, parse_faults
from kvoffloadd.device.host import HostDevice
from kvoffloadd.device.plan import Copies
from kvoffloadd.errors import ConfigError
from kvoffloadd.linux.sharedmem import create_memfd
from kvoffloadd.model import Direction, Outcome, U8Array
from kvoffloadd.testing.wait import HANG_S, until
from tests.device.memory import Made, address, noise, u64


async def copied(device: Device, src: U8Array, dst: U8Array, direction: Direction = Direction.LOAD) -> CopyResult:
    _, future = begin(device, src, dst, direction)
    async with asyncio.timeout(HANG_S):
        return await future


def begin(
    device: Device, src: U8Array, dst: U8Array, direction: Direction = Direction.LOAD
) -> tuple[Copy, asyncio.Future[CopyResult]]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[CopyResult] = loop.create_future()
    copies = Copies(u64([address(src)]), u64([address(dst)]), u64([len(src)]), 1)
    copy = device.submit(CopyRequest(direction, Made(copies), loop.time() + 20), future.set_result)
    return copy, future


def host() -> HostDevice:
    return HostDevice(asyncio.get_running_loop(), 1, 1 << 20)


async def test_without_faults_it_is_the_inner_device() -> None:
    device = FaultyDevice(host())
    src, dst = noise(4096), np.zeros(4096, np.uint8)
    for direction in [*Direction] * 3:
        dst[:] = 0
        assert (await copied(device, src, dst, direction)).outcome is Outcome.DONE
        assert np.array_equal(src, dst)
    assert device.kind == "host"
    assert device.gauges()["faults_planted"] == 0
    assert device.gauges()["load_queued"] == 0
    assert device.busy_s(asyncio.get_running_loop().time()) == 0
    fd = create_memfd("kvo-test", 4096)
    allocation = await device.map(fd, device.measure(fd, os.geteuid()), os.geteuid())
    os.close(fd)
    await device.unmap(allocation)
    assert await device.close(5)


async def test_with_a_delay_copies_take_longer() -> None:
    device = FaultyDevice(host(), delay_s=0.2)
    src, dst = noise(4096), np.zeros(4096, np.uint8)
    result = await copied(device, src, dst)
    assert result.outcome is Outcome.DONE
    assert result.seconds >= 0.2
    assert np.array_equal(src, dst)
    assert await device.close(5)


async def test_held_chunks_keep_the_bytes_in_use_for_as_long_as_the_file_exists(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    device = FaultyDevice(host(), hold=hold)
    src, dst = noise(4096), np.zeros(4096, np.uint8)
    assert (await copied(device, src, dst)).outcome is Outcome.DONE, "there is no file yet"
    dst[:] = 0
    hold.touch()
    copy, future = begin(device, src, dst)
    await asyncio.to_thread(until, lambda: device.gauges()["load_running"] == 1 or future.done(), "the chunk has begun")
    copy.cancel()
    await asyncio.sleep(0.05)
    assert not future.done(), "the chunk has begun: cancel can't end it"
    assert not dst.any()
    assert not await device.close(0.05), "the end waits no longer than for a slow copy"
    hold.unlink()
    assert (await future).outcome is Outcome.DONE
    assert np.array_equal(src, dst)
    assert await device.close(5)


async def test_corruption_flips_one_bit_of_every_nth_load() -> None:
    device = FaultyDevice(host(), corrupt_every=3)
    src = noise(4096)
    wrong = []
    for _ in range(7):
        stored, loaded = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        await copied(device, src, stored, Direction.STORE)
        assert np.array_equal(src, stored), "stores stay right"
        assert (await copied(device, src, loaded)).outcome is Outcome.DONE, "a silent fault"
        wrong.append(int(np.bitwise_count(src ^ loaded).sum()))
    assert wrong == [0, 0, 1, 0, 0, 1, 0]
    assert device.gauges()["faults_planted"] == 2
    assert await device.close(5)


async def test_an_empty_load_has_no_byte_to_flip() -> None:
    device = FaultyDevice(host(), corrupt_every=1)
    assert (await copied(device, noise(0), noise(0))).outcome is Outcome.DONE
    assert await device.close(5)


async def test_every_nth_copy_fails() -> None:
    device = FaultyDevice(host(), fail_every=2, corrupt_every=1)
    src, dst = noise(64), np.zeros(64, np.uint8)
    results = [await copied(device, src, dst, direction) for direction in [*Direction] * 2]
    assert [result.outcome for result in results] == [Outcome.DONE, Outcome.FAILED] * 2
    assert results[1].reason == "planted fault"
    assert await device.close(5)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", {}),
        ("delay_s=0.5,corrupt_every=100", {"delay_s": 0.5, "corrupt_every": 100}),
        (" fail_every = 3 , ", {"fail_every": 3}),
        ("delay_s=0", {"delay_s": 0.0}),
        ("hold=/run/hold it, fail_every=3", {"hold": Path("/run/hold it"), "fail_every": 3}),
    ],
)
def test_faults_from_text(text: str, faults: dict[str, float | Path]) -> None:
    assert parse_faults(text) == faults


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("delay=1", 'unknown "delay"; known are delay_s, hold, hold_uid, corrupt_every, fail_every'),
        ("hold=", "hold=: must be a path"),
        ("delay_s", "delay_s=: must be a number of seconds"),
        ("delay_s=-1", "number of seconds"),
        ("delay_s=inf", "number of seconds"),
        ("delay_s=fast", "number of seconds"),
        ("corrupt_every=1.5", "corrupt_every=1.5: must be a whole number"),
        ("fail_every=-2", "whole number"),
        ("fail_every=²", "whole number"),
        ("fail_every=1,fail_every=2", "given twice"),
    ],
)
def test_bad_faults_are_told(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_faults(text)


async def test_faults_from_text_make_a_device() -> None:
    device = FaultyDevice(host(), **parse_faults("fail_every=1"))
    assert (await copied(device, noise(8), noise(8, 1))).outcome is Outcome.FAILED
    assert await device.close(5)
