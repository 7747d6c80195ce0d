"""The disk of a miniature, by hand."""

from __future__ import annotations

from kvoffloadd.cache.curve.diskqueue import DiskQueue


def held(queue: DiskQueue) -> list[int]:
    return sorted(queue.names())


def test_what_was_written_first_goes_first_unless_it_was_read() -> None:
    queue = DiskQueue()
    assert not queue.write([1, 2, 3], 10, 30)
    queue.read([1, 9])
    assert queue.write([4], 10, 30)
    assert (held(queue), queue.used_bytes) == ([1, 3, 4], 30)
    assert queue.write([5, 6], 10, 30)  # one round, in which 1 is written again, keeps it no longer than others
    assert held(queue) == [1, 5, 6]
    queue.write([7], 10, 30)
    assert held(queue) == [5, 6, 7]


def test_a_key_is_written_once() -> None:
    queue = DiskQueue()
    queue.write([1], 10, 30)
    queue.write([1], 10, 30)
    assert (len(queue), queue.used_bytes) == (1, 10)


def test_what_is_dropped_leaves_room() -> None:
    queue = DiskQueue()
    queue.write([1, 2], 10, 30)
    queue.drop([1, 8])
    assert (held(queue), queue.used_bytes) == ([2], 10)
    assert queue.held([1, 2]).tolist() == [False, True]


def test_nothing_fits_into_no_disk() -> None:
    queue = DiskQueue()
    queue.write([1], 10, 5)
    queue.read([1])
    assert (held(queue), queue.used_bytes) == ([], 0)
