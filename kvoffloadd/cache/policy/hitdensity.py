"""Hit-density eviction: the keys go that earn the fewest hits per slot and time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvoffloadd.cache.policy.density import HitDensity, bucket
from kvoffloadd.cache.policy.ghost import USES_MAX, UseCounts, slots_for
from kvoffloadd.cache.policy.prompts import backwards, changes, highest_from_here, lengths
from kvoffloadd.cache.policy.rowqueue import NOWHERE, RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.model import BoolArray, I64Array, U32Array, U64Array

GHOSTS_PER_ROW = 2
TIME_MASK = 0xFFFFFFFF
TURNS_MAX = 3
REACH_SLOTS = 4096


def _class_table() -> npt.NDArray[np.uint8]:
    """Class by turns (less one) and uses: few, since all keys of a conversation share one fate."""
    table = np.zeros((TURNS_MAX, USES_MAX + 1), np.uint8)
    for turns in range(TURNS_MAX):
        table[turns, :2] = turns
        table[turns, 2:4] = TURNS_MAX + turns
        table[turns, 4:8] = 2 * TURNS_MAX
        table[turns, 8:] = 2 * TURNS_MAX + 1
    return table


CLASSES = _class_table()
NUM_CLASSES = int(CLASSES.max()) + 1


class HitDensityPolicy:
    """A `Policy` with one LRU queue per class of key. The next victim is the least valuable of the queues' oldest.

    The class of a key tells how often it was used, and in which turn of its conversation, as far as the prompt shows:
    use counts fall in steps along it, one step a turn. What a class is worth at which age is learned (`HitDensity`).
    Time is counted in keys used, modulo 2**32: a key that was not used for so long looks young again.
    """

    def __init__(self, capacity_rows: int, max_rows: int) -> None:
        self._queues = RowQueues(NUM_CLASSES, max_rows)
        self._tag = np.zeros(max_rows, np.uint32)
        self._stamp = np.zeros(max_rows, np.uint32)
        self._uses = np.zeros(max_rows, np.uint8)
        self._counts = UseCounts(GHOSTS_PER_ROW * capacity_rows)
        self._learned = HitDensity(NUM_CLASSES)
        self._now = 0
        # By the position behind its last key: turns and uses that the last prompt to end there had come to. A request's
        # new keys arrive in calls of their own, and go on from where its known keys or its earlier chunks ended.
        self._reach = [(0, 0)] * REACH_SLOTS

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        if not len(rows):
            return
        tags = hashes.astype(np.uint32)
        self._tag[rows] = tags
        classes = self._use(rows, tags, None, positions, begins)
        self._enqueue(rows, classes, begins)

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        if not len(rows):
            return
        tags = self._tag[rows]
        classes = self._use(rows, tags, self._uses[rows], positions, begins)
        self._queues.discard(rows)
        self._enqueue(rows, classes, begins)

    def remove(self, rows: U32Array) -> None:
        """See `Policy`. The keys' use counts are remembered for a while."""
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        selection = Selection(wanted, evictable)
        fronts = [Front(self._queues, queue, selection.block) for queue in range(NUM_CLASSES)]
        worth = [self._worth(front) for front in fronts]
        while not selection.done:
            least = min(worth)
            if least == float("inf"):
                break
            front = fronts[worth.index(least)]
            rows = front.rows()
            # Rows of one age bucket are worth the same; the queue is in order of age, so those of the first come first.
            front.skip(selection.offer(rows[: self._same_worth(rows)], front.queue))
            worth[front.queue] = self._worth(front)
        for queue, rows in selection.in_use():
            self._queues.set_aside(queue, rows)
        return selection.chosen()

    def readmit(self, rows: U32Array) -> None:
        self._stamp[self._queues.readmit(rows[::-1])] = self._now

    @property
    def num_aside(self) -> int:
        return self._queues.num_aside

    def resize(self, capacity_rows: int) -> None:
        """See `Policy`. Forgets the use counts of keys not held if the memory for them changes."""
        if slots_for(GHOSTS_PER_ROW * capacity_rows) != self._counts.num_slots:
            self._counts = UseCounts(GHOSTS_PER_ROW * capacity_rows)
            self._learned.forget_window()

    def __len__(self) -> int:
        return len(self._queues)

    def _use(
        self,
        rows: U32Array,
        tags: U32Array,
        uses: npt.NDArray[np.uint8] | None,
        positions: U32Array,
        begins: I64Array | None,
    ) -> npt.NDArray[np.uint8]:
        """Count one more use of each key, and learn from it. Returns their classes, which fall along the prompt.

        `uses`: the counts so far; None: as remembered.
        """
        slots = self._counts.slots(tags)
        known, remembered = self._counts.look_up(tags, slots)
        uses = remembered if uses is None else uses
        uses = np.minimum(uses + np.uint8(1), np.uint8(USES_MAX))
        # A key was used at least as often as any that follows it. This mends counts that were forgotten: a gap that
        # looks unused would be evicted first, and takes all that follows it out of reach.
        now: int | U32Array
        turns: int | I64Array
        if begins is None:
            uses = np.maximum.accumulate(uses[::-1])[::-1]
            turns, now = self._turns(uses, positions), self._now
        else:
            uses = highest_from_here(uses, begins)
            many = lengths(begins, len(rows))
            turns = np.repeat(self._turns_of_each(uses, positions, begins), many)
            now = np.repeat(self._now + begins, many).astype(np.uint32)  # modulo 2**32
        classes: npt.NDArray[np.uint8] = CLASSES[turns - 1, uses]
        self._learned.record(slots, known, classes, now)
        self._counts.record(tags, slots, uses)
        self._uses[rows] = uses
        self._stamp[rows] = now
        self._now = (self._now + len(rows)) & TIME_MASK
        return classes

    def _turns(self, uses: npt.NDArray[np.uint8], positions: U32Array) -> int:
        """Steps of the use counts from the prompt's begin to its last key here, 1..TURNS_MAX."""
        steps = int(np.count_nonzero(uses[1:] != uses[:-1]))
        return self._turns_by(steps, int(uses[0]), int(uses[-1]), int(positions[0]), int(positions[-1]))

    def _turns_of_each(self, uses: npt.NDArray[np.uint8], positions: U32Array, begins: I64Array) -> I64Array:
        """The same of several prompts."""
        ends = begins + lengths(begins, len(uses)) - 1
        steps = np.add.reduceat(changes(uses, begins), begins, dtype=np.int64)
        told = (steps, uses[begins], uses[ends], positions[begins], positions[ends])
        found = [self._turns_by(*one) for one in zip(*(array.tolist() for array in told), strict=True)]
        return np.array(found, np.int64)

    def _turns_by(self, steps: int, first_uses: int, last_uses: int, first: int, last: int) -> int:
        turns, uses_before = self._reach[first % REACH_SLOTS] if first else (0, 0)
        turns += int(first_uses != uses_before) + steps
        turns = max(1, min(turns, TURNS_MAX))
        self._reach[(last + 1) % REACH_SLOTS] = (turns, last_uses)
        return turns

    def _enqueue(self, rows: U32Array, classes: npt.NDArray[np.uint8], begins: I64Array | None) -> None:
        if begins is not None:
            new = changes(classes, begins)
            new[begins] = True
            rows = rows[backwards(np.flatnonzero(new), len(rows))]
            for number in np.flatnonzero(np.bincount(classes)).tolist():
                self._queues.append(number, rows[classes == number])
            return
        start = 0
        ends = [*(np.flatnonzero(classes[1:] != classes[:-1]) + 1).tolist(), len(rows)]
        for end in ends:
            self._queues.append(int(classes[start]), rows[start:end][::-1])
            start = end

    def _age(self, row: int) -> int:
        return (self._now - int(self._stamp[row])) & TIME_MASK

    def _worth(self, front: Front) -> float:
        row = front.first()
        return float("inf") if row == NOWHERE else self._learned.density(front.queue, self._age(row))

    def _same_worth(self, rows: U32Array) -> int:
        """How many of the rows, from the first on, are in its age bucket."""
        stamps = self._stamp[rows]
        here = bucket(self._age(int(rows[0])))
        if bucket(self._age(int(rows[-1]))) == here:
            return len(rows)
        changes = np.flatnonzero(stamps[1:] != stamps[:-1]) + 1
        for at in changes.tolist():
            if bucket(self._age(int(rows[at]))) != here:
                return int(at)
        return len(rows)


class Front:
    """How far one call of `victims` has come in one queue. Reads the queue no further than it is asked to."""

    def __init__(self, queues: RowQueues, queue: int, block: Callable[[], int]) -> None:
        self.queue = queue
        self._first = queues.head(queue)
        self._blocks = queues.scan(queue, block)
        self._rows: U32Array | None = None

    def first(self) -> int:
        """The oldest row not yet passed, or NOWHERE."""
        return self._first

    def rows(self) -> U32Array:
        """Some of the rows not yet passed, oldest first; at least one, unless `first` says that there is none."""
        if self._rows is None:
            self._rows = next(self._blocks)
        return self._rows

    def skip(self, count: int) -> None:
        """Pass this many of `rows`."""
        rows = self.rows()[count:]
        self._rows = rows if len(rows) else next(self._blocks, None)
        self._first = NOWHERE if self._rows is None else int(self._rows[0])
