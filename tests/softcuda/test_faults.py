"""Every fault that softcuda can have comes when it is asked for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.driver")

from tests.softcuda import faulty
from tests.softcuda.running import result, run


@pytest.mark.parametrize(
    ("program", "faults", "returned"),
    [
        (faulty.sticky, "sticky_after=3", "None"),
        (faulty.full_queue, "queue_depth=3", "None"),
        (faulty.shared_block, "small_block", f"[1024, 1024, {2 << 20}, 1, 2]"),
        (faulty.shared_block, "packed", f"[{2 << 20}, 0, 3000, 1, 2]"),
        (faulty.small_allocations, "small_block", "[2, 4, 0]"),
        (faulty.host_pointers, "no_host_pointers", "0"),
        (faulty.host_pointers, "", "1"),
        (faulty.stream_writes, "no_stream_writes", "[0, 801]"),
        (faulty.stream_writes, "", "[1, 0]"),
        (faulty.batches_that_end, "batch_hangs_after=2", "[True, False]"),
        (faulty.batches_that_end, "pitched_batch_hangs_after=1", "[True, True]"),
        (faulty.pitched_batches_that_end, "pitched_batch_hangs_after=2", "[True, False]"),
        (faulty.pitched_batches_that_end, "batch_hangs_after=1", "[True, True]"),
        (faulty.hang, "hang_after=2", "None"),
        (faulty.hang_one_way, "hang_device_to_host=2", "None"),
        (faulty.hang_other_way, "hang_host_to_device=2", "None"),
        (faulty.link, "link_bytes_per_s=5242880", "None"),
        (faulty.delay, "delay_copies_ns=500000000", "None"),
        (faulty.failed_submits, "fail_submit_every=3", "001001"),
        (faulty.corruption, "corrupt_every=2", "0101"),
        *((faulty.open_code, f"open_error={code}", str(code)) for code in (1, 201, 400, 801, 999)),
        *((faulty.nothing, f"init_error={code}", str(code)) for code in (100, 304, 999)),
        (faulty.context_code, "context_error=46", "46"),
        (faulty.event_codes, "query_error=806,query_fails_every=3", "[0, 0, 0, 0, 806, 0]"),
        (faulty.event_codes, "query_error=805", "[0, 805, 805, 0, 805, 805]"),
        (faulty.event_codes, "record_error=2,record_fails_every=2", "[0, 0, 0, 2, 0, 0]"),
        (faulty.registrations, "register_error_after=2500000", "[0, 0, 2]"),
        (faulty.registrations, "register_fails_every=2", "[0, 2, 0]"),
        (faulty.unregistered, "", "[0, 7, 7, 2]"),
        (faulty.slow_submits, "submit_ns=1000000", "None"),
        (faulty.open_code, "dead_exporter", "205"),
        (faulty.slow_close, "close_delay_ns=100000000", "None"),
        (faulty.batch_is_missing, "no_batch", "500"),
        (faulty.pitched_batch_code, "no_pitched_batch", "500"),
        (faulty.pitched_batch_code, "pitched_batch_error=801", "801"),
        (faulty.pitched_batch_code, "pitched_error=1", "1"),
        (faulty.pitched_batch_code, "no_batch", "0"),
        (faulty.early_reads, "read_early", "1212"),
        (faulty.early_reads, "jitter_ns=1", "2222"),
        (faulty.poisoned, "poison", "[219, 7, 219]"),
        (faulty.poisoned, "jitter_ns=1", "[0, 7, 7]"),
        (faulty.open_code, "", "0"),
        (faulty.corruption, "", "0000"),
        (faulty.failed_submits, "jitter_ns=1,fail_submit_every=3", "001001"),
    ],
)
def test_fault(program: Callable[[], object], faults: str, returned: str) -> None:
    assert result(program, faults) == returned


def test_jitter() -> None:
    seconds = [float(result(faulty.jitter, "jitter_ns=20000000", {"seed": seed})) for seed in (1, 2)]
    assert all(0.05 <= each <= 5 for each in seconds)
    assert float(result(faulty.jitter)) < min(seconds)


def test_copies_are_held_for_as_long_as_the_file_exists(tmp_path: Path) -> None:
    (tmp_path / "hold").touch()
    result(faulty.held, "", {"hold": str(tmp_path / "hold")})


def test_a_registration_may_hold_the_lock() -> None:
    pace = {"register_ns_per_gib": 1024 * 200_000_000}
    assert float(result(faulty.register_seconds, "register_holds_lock", pace)) >= 0.1
    result(faulty.register_seconds, "", pace)


def test_contexts_take_time_and_memory() -> None:
    result(faulty.context_seconds, "", {"context_ns": 200_000_000, "context_bytes": 1 << 30})


def test_the_devices_address_of_host_memory_may_be_another() -> None:
    ended = run(faulty.offset_pointers, "host_offset=1073741824", {"misuse": "error"})
    assert ended.stdout == f"[{1 << 30}, 1, 0, 0, 7]\n"
    assert "no device memory" in ended.stderr
    assert result(faulty.offset_pointers) == "[0, 0, 0, 7, 7]"


def test_the_driver_takes_time_to_begin() -> None:
    result(faulty.init_seconds, "", {"init_ns": 200_000_000})


@pytest.mark.parametrize(
    ("faults", "settings", "message"),
    [
        ("hang", {}, "unknown fault: hang"),
        ("no_batch=1", {}, "fault takes no value: no_batch"),
        ("hang_after", {}, "fault needs a value: hang_after"),
        ("hang_after=0", {}, "not a positive number: 0"),
        ("hang_after=1x", {}, "not a positive number: 1x"),
        ("no_batch,", {}, "unknown fault: "),
        ("", {"devices": "two"}, "not a number: two"),
        ("", {"devices": 17}, "too many devices: 17"),
        ("", {"misuse": "ignore"}, "is abort or error, not: ignore"),
        ("", {"hold": ""}, "not a path"),
        ("", {"device": 2}, "unknown variable: "),
    ],
)
def test_what_is_misspelt_is_refused(faults: str, settings: dict[str, int | str], message: str) -> None:
    ended = run(faulty.nothing, faults, settings)
    assert ended.returncode == -signal.SIGABRT
    assert message in ended.stderr
