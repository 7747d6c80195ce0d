"""Queues of rows in chunks of one shared pool: the order that the policies keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvoffloadd.model import BoolArray, I64Array, U8Array, U32Array

NOWHERE = 0xFFFFFFFF
"""As a row's place: in no queue. As a chunk: none."""

MERGE_TRIES = 8


class RowQueues:
    """`num_queues` queues, oldest row first; a row is in one of them, aside, or in none.

    A row's place is an index into the pool, and a pool entry counts only while its row refers to it. So removing a row
    touches only its columns, wherever it lies, and leaves a stale entry behind. A chunk returns to the pool when its
    last row leaves it. While more than half of all entries are stale, every chunk that is taken pays for a few tries to
    merge neighbours, so no call ever sweeps the pool.

    A row that is aside is in no queue, but belongs to one: `readmit` puts it at the end of that queue.

    Memory: 5 bytes per row below the highest one used, and 4 bytes per entry of the chunks in use.
    """

    def __init__(self, num_queues: int, max_rows: int, chunk_rows: int = 1024) -> None:
        """`num_queues` is below 255; `chunk_rows`: entries per chunk, a power of two. The pool's memory is committed as
        it is used.
        """
        self._aside = num_queues  # the last queue, for rows aside
        num_queues += 1
        self._shift = chunk_rows.bit_length() - 1
        self._chunk_rows = chunk_rows
        num_chunks = 4 * (-(-max_rows // chunk_rows) + num_queues + 1)
        self._place = np.zeros(max_rows, np.uint32)  # place + 1, so that fresh zero pages mean "in no queue"
        self._home: U8Array = np.zeros(max_rows, np.uint8)  # of a row that is aside: its queue + 1
        self._pool = np.zeros(num_chunks << self._shift, np.uint32)
        # Per chunk; lists, as they are used one item at a time. Only the last chunk of a queue may have no live rows.
        self._live = [0] * num_chunks
        self._start = [0] * num_chunks  # entries before it are stale
        self._end = [0] * num_chunks
        self._next = [NOWHERE] * num_chunks
        self._previous = [NOWHERE] * num_chunks
        self._queue_of = [0] * num_chunks
        self._first = [NOWHERE] * num_queues
        self._last = [NOWHERE] * num_queues
        self._free: list[int] = []
        self._fresh = 0  # chunks from here on were never used
        self._num_chunks = num_chunks
        self._sweep = NOWHERE  # the next chunk to try to merge, and its queue
        self._sweep_queue = 0
        self._sizes = [0] * num_queues

    def __len__(self) -> int:
        return sum(self._sizes)

    def size(self, queue: int) -> int:
        """Returns the number of rows in this queue, without those aside."""
        return self._sizes[queue]

    @property
    def num_aside(self) -> int:
        """Rows aside, of all queues."""
        return self._sizes[self._aside]

    @property
    def chunks_in_use(self) -> int:
        """Chunks that hold entries, live or stale."""
        return self._fresh - len(self._free)

    def queues_of(self, rows: U32Array) -> I64Array:
        """Returns the queue that each row is in, or belongs to if it is aside."""
        chunks, which = np.unique((self._place[rows] - np.uint32(1)) >> np.uint32(self._shift), return_inverse=True)
        queues = np.array([self._queue_of[chunk] for chunk in chunks.tolist()], np.int64)[which]
        aside = queues == self._aside
        if aside.any():
            queues[aside] = self._home[rows[aside]].astype(np.int64) - 1
        return queues

    def append(self, queue: int, rows: U32Array) -> None:
        """Puts distinct rows that are in no queue behind all others, `rows[0]` first."""
        self._sizes[queue] += len(rows)
        written = 0
        while written < len(rows):
            chunk = self._last[queue]
            if chunk == NOWHERE or self._end[chunk] == self._chunk_rows:
                chunk = self._take_chunk(queue)
            end = self._end[chunk]
            count = min(len(rows) - written, self._chunk_rows - end)
            self._write(chunk, end, rows[written : written + count])
            self._live[chunk] += count
            written += count

    def discard(self, rows: U32Array) -> None:
        """Removes distinct rows from their places; each must be in a queue or aside."""
        if not len(rows):
            return
        if self.num_aside:
            self._home[rows] = 0
        chunks = (self._place[rows] - np.uint32(1)) >> np.uint32(self._shift)
        self._place[rows] = 0
        if chunks[0] == chunks[-1] and (chunks == chunks[0]).all():  # the common case: a prompt's keys lie together
            self._leave(int(chunks[0]), len(rows))
            return
        for chunk, count in zip(*(a.tolist() for a in np.unique(chunks, return_counts=True)), strict=True):
            self._leave(chunk, count)

    def move(self, queue: int, rows: U32Array) -> None:
        """Puts distinct rows that are in some queue or aside behind all others of this one, `rows[0]` first."""
        self.discard(rows)
        self.append(queue, rows)

    def set_aside(self, queue: int, rows: U32Array) -> None:
        """Puts distinct rows that are in some queue or aside out of every scan's way; they belong to this queue."""
        self.move(self._aside, rows)
        self._home[rows] = queue + 1

    def set_aside_each(self, rows: U32Array, queues: I64Array) -> None:
        """Puts rows aside as `set_aside`; each comes with the queue that it belongs to."""
        for queue in np.unique(queues).tolist():
            self.set_aside(queue, rows[queues == queue])

    def readmit(self, rows: U32Array) -> U32Array:
        """Puts the distinct rows that are aside behind all others of their queues, first one first. Returns them."""
        if not self.num_aside:
            return rows[:0]
        homes = self._home[rows]
        rows, homes = rows[homes > 0], homes[homes > 0]
        for home in np.unique(homes).tolist():
            self.move(home - 1, rows[homes == home])
        return rows

    def head(self, queue: int) -> int:
        """Returns the oldest row, or NOWHERE if the queue is empty."""
        if not self._sizes[queue]:
            return NOWHERE
        chunk = self._first[queue]
        base, start = chunk << self._shift, self._start[chunk]
        row = int(self._pool[base + start])
        if self._place[row] != base + start + 1:
            stop = base + self._end[chunk]
            start += int(self._live_mask(base + start, stop).argmax())
            self._start[chunk] = start
            row = int(self._pool[base + start])
        return row

    def scan(self, queue: int, block: Callable[[], int]) -> Iterator[U32Array]:
        """Yields the rows, oldest first, at most `block()` at a time. Nothing may be changed until the scan is over."""
        chunk = self._first[queue]
        while chunk != NOWHERE:
            base = chunk << self._shift
            start, stop = base + self._start[chunk], base + self._end[chunk]
            while self._live[chunk] and start < stop:
                until = min(start + block(), stop)
                rows = self._pool[start:until][self._live_mask(start, until)]
                if len(rows):
                    yield rows
                start = until
            chunk = self._next[chunk]

    def _live_mask(self, start: int, stop: int) -> BoolArray:
        places: BoolArray = self._place[self._pool[start:stop]] == np.arange(start + 1, stop + 1, dtype=np.uint32)
        return places

    def _write(self, chunk: int, offset: int, rows: U32Array) -> None:
        start = (chunk << self._shift) + offset
        self._pool[start : start + len(rows)] = rows
        self._place[rows] = np.arange(start + 1, start + len(rows) + 1, dtype=np.uint32)
        self._end[chunk] = offset + len(rows)

    def _leave(self, chunk: int, count: int) -> None:
        queue = self._queue_of[chunk]
        self._sizes[queue] -= count
        self._live[chunk] -= count
        if not self._live[chunk]:
            if chunk == self._last[queue]:
                self._start[chunk] = self._end[chunk] = 0
            else:
                self._free_chunk(chunk)

    def _take_chunk(self, queue: int) -> int:
        limit = 2 * (len(self) >> self._shift) + 2 * len(self._first)
        tries = MERGE_TRIES if self.chunks_in_use > limit else 0
        while tries or not self._room():  # without room, sweep on until there is some: merging can always make it
            self._merge_next()
            tries = max(0, tries - 1)
        if self._free:
            chunk = self._free.pop()
        else:
            chunk, self._fresh = self._fresh, self._fresh + 1
        self._start[chunk] = self._end[chunk] = 0
        self._queue_of[chunk] = queue
        last = self._last[queue]
        self._previous[chunk], self._next[chunk] = last, NOWHERE
        if last == NOWHERE:
            self._first[queue] = chunk
        else:
            self._next[last] = chunk
        self._last[queue] = chunk
        return chunk

    def _room(self) -> bool:
        return bool(self._free) or self._fresh < self._num_chunks

    def _free_chunk(self, chunk: int) -> None:
        """Unlinks a chunk without live entries and gives it back."""
        queue, before, after = self._queue_of[chunk], self._previous[chunk], self._next[chunk]
        if before == NOWHERE:
            self._first[queue] = after
        else:
            self._next[before] = after
        if after == NOWHERE:
            self._last[queue] = before
        else:
            self._previous[after] = before
        if self._sweep == chunk:
            self._sweep = after
        self._free.append(chunk)

    def _merge_next(self) -> None:
        """Examines one chunk and its younger neighbour, and merges them if one chunk can hold the live rows of both."""
        if self._sweep == NOWHERE:
            self._sweep_queue = (self._sweep_queue + 1) % len(self._first)
            self._sweep = self._first[self._sweep_queue]
            return
        chunk = self._sweep
        after = self._next[chunk]
        if after == NOWHERE or self._live[chunk] + self._live[after] > self._chunk_rows:
            self._sweep = after
            return
        base = chunk << self._shift
        rows = self._pool[base : base + self._end[chunk]][self._live_mask(base, base + self._end[chunk])]
        base = after << self._shift
        younger = self._pool[base : base + self._end[after]][self._live_mask(base, base + self._end[after])]
        self._write(chunk, 0, np.concatenate((rows, younger)))
        self._start[chunk] = 0
        self._live[chunk] += self._live[after]
        self._live[after] = 0
        self._free_chunk(after)
