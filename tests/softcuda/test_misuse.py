"""Every rule that softcuda watches over is really watched: a program that breaks it dies with a message."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable

import pytest

pytest.importorskip("cuda.bindings.driver")

from tests.softcuda import misuses
from tests.softcuda.running import result, run

INVALID_VALUE, INVALID_CONTEXT, ALREADY_MAPPED = 1, 201, 208
INVALID_HANDLE, ILLEGAL_STATE, ILLEGAL_ADDRESS, NOT_REGISTERED, NOT_SUPPORTED = 400, 401, 700, 713, 801

MISUSES: list[tuple[Callable[[], int], int, str]] = [
    (misuses.copy_beyond_allocation, INVALID_VALUE, "reaches beyond its end"),
    (misuses.copy_to_freed_memory, INVALID_VALUE, "is live device memory"),
    (misuses.copy_to_closed_memory, INVALID_VALUE, "is live device memory"),
    (misuses.copy_to_unmapped_chunk, INVALID_VALUE, "is live device memory"),
    (misuses.copy_beyond_chunks, INVALID_VALUE, "reaches beyond its end"),
    (misuses.copy_without_access, INVALID_VALUE, "device 0 has no access to it"),
    (misuses.copy_with_access_of_another_device, INVALID_VALUE, "device 1 has no access to it"),
    (misuses.copy_unregistered, INVALID_VALUE, "is not registered"),
    (misuses.copy_across_registrations, INVALID_VALUE, "is not within one registration"),
    (misuses.copy_now_across_a_registration, INVALID_VALUE, "is not within one registration"),
    (misuses.copy_the_wrong_way, INVALID_VALUE, "a copy of another kind"),
    (misuses.copy_within_the_host, INVALID_VALUE, "is live device memory"),
    (misuses.copy_of_another_device, INVALID_VALUE, "memory of device 1"),
    (misuses.pitched_beyond_allocation, INVALID_VALUE, "reaches beyond its end"),
    (misuses.pitched_beyond_registration, INVALID_VALUE, "is not within one registration"),
    (misuses.pitched_rows_that_overlap, INVALID_VALUE, "rows of 1024 bytes, 1000 apart"),
    (misuses.pitched_too_far_apart, INVALID_VALUE, "rows of 1024 bytes, 2147483648 apart"),
    (misuses.pitched_batch_beyond_allocation, INVALID_VALUE, "cuMemcpy3DBatchAsync: 0x"),
    (misuses.pitched_batch_of_rows_that_overlap, INVALID_VALUE, "cuMemcpy3DBatchAsync: rows of 1024 bytes, 1000 apart"),
    (misuses.pitched_batch_with_overlap, INVALID_VALUE, "cuMemcpy3DBatchAsync: overlapping destinations"),
    (misuses.batch_across_allocations, INVALID_VALUE, "reaches beyond its end"),
    (misuses.batch_with_overlap, INVALID_VALUE, "overlapping destinations"),
    (misuses.batch_that_reads_within_the_call, NOT_SUPPORTED, "DURING_API_CALL is not modelled"),
    (misuses.free_under_copy, ILLEGAL_ADDRESS, "cuMemFree: closed under a running copy"),
    (misuses.close_under_copy, ILLEGAL_ADDRESS, "cuIpcCloseMemHandle: closed under a running copy"),
    (misuses.unmap_under_copy, ILLEGAL_ADDRESS, "cuMemUnmap: closed under a running copy"),
    (misuses.unregister_under_copy, ILLEGAL_ADDRESS, "cuMemHostUnregister: closed under a running copy"),
    (misuses.munmap_under_copy, ILLEGAL_ADDRESS, "is unmapped"),
    (misuses.context_released_under_copy, ILLEGAL_STATE, "released under running work"),
    (misuses.context_released_twice, INVALID_CONTEXT, "released too often"),
    (misuses.free_twice, INVALID_VALUE, "freed twice"),
    (misuses.close_twice, INVALID_VALUE, "closed twice"),
    (misuses.close_of_own_memory, INVALID_VALUE, "never opened"),
    (misuses.open_of_own_handle, INVALID_CONTEXT, "the process's own handle"),
    (misuses.export_of_freed_memory, INVALID_VALUE, "cuIpcGetMemHandle: no memory"),
    (misuses.register_nothing, INVALID_VALUE, "cuMemHostRegister: no memory"),
    (misuses.unregister_twice, NOT_REGISTERED, "undone twice"),
    (misuses.destroyed_stream, INVALID_HANDLE, "is destroyed"),
    (misuses.null_stream_destroyed, INVALID_HANDLE, "the NULL stream"),
    (misuses.stream_of_another_context, INVALID_HANDLE, "stream 0x5c"),
    (misuses.destroyed_event, INVALID_HANDLE, "is destroyed"),
    (misuses.event_of_another_context, INVALID_HANDLE, "event 0x5c"),
    (misuses.write_to_unregistered, INVALID_VALUE, "cuStreamWriteValue64: no device memory"),
    (misuses.write_unaligned, INVALID_VALUE, "is not aligned"),
    (misuses.write_beyond_registration, INVALID_VALUE, "reaches beyond its registration"),
    (misuses.fill_beyond_allocation, INVALID_VALUE, "cuMemsetD8: 0x"),
    (misuses.map_without_reservation, INVALID_VALUE, "is not reserved"),
    (misuses.map_twice, ALREADY_MAPPED, "is mapped in"),
    (misuses.map_released_handle, INVALID_VALUE, "is released"),
    (misuses.unmap_twice, INVALID_VALUE, "is not made of whole mappings"),
    (misuses.access_beyond_mappings, INVALID_VALUE, "is not made of whole mappings"),
    (misuses.address_freed_while_mapped, INVALID_VALUE, "still mapped"),
    (misuses.address_freed_in_part, INVALID_VALUE, "is not reserved as such"),
    (misuses.release_twice, INVALID_VALUE, "is released"),
]

each_misuse = pytest.mark.parametrize(
    ("program", "error", "message"), MISUSES, ids=[program.__name__ for program, _, _ in MISUSES]
)

Ends = dict[str, tuple[int, str]]


@pytest.fixture(scope="module")
def aborted() -> Ends:
    """How each program ends: its exit status, and all that was printed."""
    ends: Ends = json.loads(result(misuses.all_of_them))
    return ends


@pytest.fixture(scope="module")
def answered() -> Ends:
    """The same, of programs that only get errors for their misuse."""
    ends: Ends = json.loads(result(misuses.all_of_them, settings={"misuse": "error"}))
    return ends


def test_every_program_is_tried(aborted: Ends) -> None:
    assert [*aborted] == [program.__name__ for program, _, _ in MISUSES]


@each_misuse
def test_it_aborts(program: Callable[[], int], error: int, message: str, aborted: Ends) -> None:
    status, output = aborted[program.__name__]
    assert status == -signal.SIGABRT, output
    assert output.startswith("softcuda: misuse: ")
    assert message in output.splitlines()[0]


@each_misuse
def test_it_is_an_error_where_that_is_asked_for(
    program: Callable[[], int], error: int, message: str, answered: Ends
) -> None:
    status, output = answered[program.__name__]
    line, answer = output.splitlines()
    assert (status, int(answer)) == (0, error)
    assert line.startswith("softcuda: misuse: ")
    assert message in line


def test_a_process_of_its_own_aborts() -> None:
    ended = run(misuses.free_twice)
    assert ended.returncode == -signal.SIGABRT
    assert "softcuda: misuse: cuMemFree" in ended.stderr
