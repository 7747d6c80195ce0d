"""Hit-density eviction: evicts the keys that earn the fewest hits per slot and time."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

from kvoffloadd.cache.policy.base import TIME_MASK, Clock
from kvoffloadd.cache.policy.ghost import USES_MAX, UseCounts, slots_for
from kvoffloadd.cache.policy.prompts import backwards, changes, lengths
from kvoffloadd.cache.policy.returning import Returning
from kvoffloadd.cache.policy.rowqueue import NOWHERE, RowQueues
from kvoffloadd.cache.policy.selection import Selection
from kvoffloadd.model import BoolArray, F64Array, I64Array, U8Array, U32Array, U64Array

GHOSTS_PER_ROW = 2
TURNS_MAX = 3
REACH_SLOTS = 4096

NUM_BUCKETS = 64
"""The number of age classes, one for each half power of two; these cover 32 bits."""

WINDOW_SLOTS = 1 << 16
"""The number of keys observed at a time. More would sharpen the estimates a little and make `refresh` slower."""

PIECE_SLOTS = 1 << 14
"""The number of slots that `refresh` examines at a time: their data fits into the processor's caches."""

REFRESH_EVENTS_MIN, REFRESH_EVENTS_MAX = 256, 8192

# The belief before any observation, and for ages without observations: this share of the keys used once returns in each
# bucket. That falls as 1 / age: the order within a class is LRU. The weights are numbers of observed keys that count as
# much as the belief, and as the observations of all classes together.
PRIOR_RETURNS = 0.008
PRIOR_WEIGHT = 500.0
POOLED_WEIGHT = 20.0

BELIEF_BY_USES = {1: 1.0, 2: 5.0, 4: 10.0, 8: 15.0, 16: 20.0}
"""By the use counts at which classes begin: how many times likelier keys of the class are believed to return. So keys
used more than once outlive a flood of keys without a precedent.
"""

TRUSTED_AT = 2.0
"""The ratio of returns, at equal ages, of keys used more than once to keys used once at which the belief applies in
full. If the ratio is at most 1, all classes are believed to be alike.
"""

TRUST_WEIGHT = 100.0
"""The number of observed returns that count as much as the belief."""

RETURNS_MAX = 0.8
"""The highest believed share of returns."""

BELIEF_IN_DONE = 0.01
"""A fraction of the returns believed of other keys before any observation: as if keys in DONE were a hundred times
older.
"""

WORTH_SLACK = 1.05
"""Victims come from the queue with the least valuable key until its keys are worth this many times those of others."""

_EDGES = 2.0 ** (np.arange(NUM_BUCKETS + 1) / 2)
_LATER = np.triu(np.ones((NUM_BUCKETS, NUM_BUCKETS), np.bool_))
_HALF_WIDTHS = np.diff(_EDGES) / 2 * _LATER
_MANTISSA_BITS, _EXPONENT_BIAS = 52, 1023  # of a float64


def _class_table() -> U8Array:
    """Returns the class by turns (less one) and uses: few, since all keys of a conversation share one fate.

    Uses above 16 have no separate class: hits on all workloads were the same with one more at 64.
    """
    table = np.zeros((TURNS_MAX, USES_MAX + 1), np.uint8)
    for turns in range(TURNS_MAX):
        table[turns, :2] = turns
        table[turns, 2:4] = TURNS_MAX + turns
        table[turns, 4:8] = 2 * TURNS_MAX
        table[turns, 8:16] = 2 * TURNS_MAX + 1
        table[turns, 16:] = 2 * TURNS_MAX + 2
    return table


CLASSES = _class_table()
SOON = int(CLASSES.max()) + 1
"""The class of keys that a client expects to use again soon."""

DONE = SOON + 1
"""The class of keys that a client does not expect to use again."""

LOST = DONE + 1
"""The class of keys that can't be restored: worth nothing."""

NUM_CLASSES = LOST + 1


def _beliefs() -> F64Array:
    """Returns how many times likelier the keys of each class are believed to return."""
    beliefs = np.ones((NUM_CLASSES, 1))
    for uses, times in BELIEF_BY_USES.items():
        beliefs[CLASSES[:, uses]] = times
    beliefs[DONE], beliefs[LOST] = BELIEF_IN_DONE, 0.0
    return beliefs


BELIEFS = _beliefs()


def _chain() -> list[tuple[int, int]]:
    """Returns pairs of classes (behind, before) that follow each other along a prompt, from its end: uses fall along
    it.
    """
    pairs = [(int(classes[uses]), int(classes[2 * uses])) for uses in (1, 2, 4, 8) for classes in CLASSES]
    return list(dict.fromkeys(pairs))


CHAIN = _chain()


class HitDensity:
    """Watches a sample of keys and estimates, for each class and age, the hits that keeping such a key is worth.

    A watched slot holds the class and time of its key's last use. The key's return is a hit at some age; a key that is
    overwritten by another key, or still waits, shows only that it has not returned yet. These give the share of keys
    that return at each age (a life table, with lost keys counted up to their last sighting), and that gives the
    density: the best ratio, over all times for which the key might be kept, of the chance of a hit within that time to
    the slot time spent until then. Old observations fade: their weight halves after as many uses of watched keys as the
    window has slots.

    A key is out of reach without the keys before it in its prompt. Every use of it uses them, too: they were used as
    often or more, and as recently or later. So some keys are known to be worth no less than others, whatever few
    observations suggest: at each age a class is worth no less than one behind it in prompts (`chain`: pairs, behind and
    before), and in a class the younger key. Without this, chance observations evict keys in the middle of prompts.
    """

    def __init__(self, num_classes: int, chain: Sequence[tuple[int, int]] = ()) -> None:
        self._chain = chain
        # By whether the key came back (1) or was lost from sight (0), by class + 1, and by the bucket of its age then.
        # The counts for class + 1 = 0, the slots without a watched key, are meaningless.
        self._ends = np.zeros((2, num_classes + 1, NUM_BUCKETS))
        self._events = 0
        self._events_faded = 0
        self.is_stale = False
        self.forget_window()
        self._table = _unlearned(num_classes, tuple(chain))  # replaced, never changed
        self._density: list[list[float]] = self._table.tolist()  # the same: looked up one by one, lists are faster

    def forget_window(self) -> None:
        """Stops watching the present keys; the learned densities stay."""
        self._code = np.zeros(WINDOW_SLOTS, np.uint8)  # class + 1; 0 = nothing watched
        self._stamp = np.zeros(WINDOW_SLOTS, np.uint32)

    def record(self, slots: U32Array, known: BoolArray, classes: U8Array, now: int | U32Array) -> None:
        """Records that keys were used at `now` (all, or each), and are of these classes from now on.

        Slots beyond the window are not watched. `known`: the slot belongs to the key from an earlier use.
        """
        watched = np.flatnonzero(slots < WINDOW_SLOTS)
        if len(watched) < len(slots):
            if not len(watched):
                return
            slots, known, classes = slots[watched], known[watched], classes[watched]
            now = now[watched] if isinstance(now, np.ndarray) else now
        cells = self._cells(slots, now) + known * (self._ends.size // 2)
        np.add.at(self._ends.reshape(-1), cells, 1.0)
        self._code[slots] = classes + np.uint8(1)
        self._stamp[slots] = now
        self._events += len(slots)
        due = self._events_faded + min(max(self._events // 4, REFRESH_EVENTS_MIN), REFRESH_EVENTS_MAX)
        if self._events >= due:
            self._fade()
            self.is_stale = True

    def _fade(self) -> None:
        self._ends *= 0.5 ** ((self._events - self._events_faded) / WINDOW_SLOTS)
        self._events_faded = self._events

    def density(self, key_class: int, age: int) -> float:
        """Returns the hits per unit of time that a slot earns with such a key; comparable between classes and ages."""
        place = 2 * math.log2(max(age, 1))
        edge, of_class = int(place), self._density[key_class]
        return of_class[edge] + (place - edge) * (of_class[edge + 1] - of_class[edge])

    def densities(self, classes: int | I64Array, ages: U32Array) -> F64Array:
        """Returns the `density` of each of these keys, which share one class or have one each."""
        places = 2 * np.log2(np.maximum(ages, 1))
        edges = places.astype(np.int64)
        found: F64Array = self._table[classes, edges]
        found += (places - edges) * (self._table[classes, edges + 1] - found)
        return found

    def refresh(self, now: int) -> None:
        """Computes the densities anew; takes a millisecond or two, whatever the capacity. Worthwhile if `is_stale`:
        many observations have come since the last time.
        """
        self._fade()
        self.is_stale = False
        counts = np.zeros(self._ends[0].size, np.int64)
        for start in range(0, WINDOW_SLOTS, PIECE_SLOTS):
            counts += np.bincount(self._cells(slice(start, start + PIECE_SLOTS), now), minlength=len(counts))
        hits, unreturned = self._ends[1, 1:], (self._ends[0] + counts.reshape(self._ends[0].shape))[1:]
        self._table = densities(_in_order(*_returns(hits, unreturned), self._chain))
        self._density = self._table.tolist()

    def _cells(self, slots: U32Array | slice, now: int | U32Array) -> I64Array:
        """Returns class + 1 and age of the keys watched in these slots, as an index into one half of `_ends`."""
        ages = np.maximum(np.uint32(now) - self._stamp[slots], 1).astype(np.float64)
        ages *= ages
        # The exponent of the square, as in `bucket`: exact, where a logarithm may round across an edge.
        buckets: I64Array = (ages.view(np.int64) >> _MANTISSA_BITS) - _EXPONENT_BIAS
        return buckets + self._code[slots] * np.int64(NUM_BUCKETS)


@functools.cache
def _unlearned(num_classes: int, chain: tuple[tuple[int, int], ...]) -> F64Array:
    """Returns the densities without observations. A registration may make very many policies."""
    nothing = np.zeros((num_classes, NUM_BUCKETS))
    return densities(_in_order(*_returns(nothing, nothing), chain))


def _returns(hits: F64Array, unreturned: F64Array) -> tuple[F64Array, F64Array]:
    """Returns how many keys return in each bucket of age, and how many reach it; by class. All classes together add
    some observations to each class, scaled by the beliefs about its returns.

    `unreturned`: keys that were seen up to this age, without a return.
    """
    ended = hits + unreturned
    older = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - ended
    at_risk = older + hits + unreturned / 2
    pooled = (hits.sum(0) + PRIOR_WEIGHT * PRIOR_RETURNS) / (at_risk.sum(0) + PRIOR_WEIGHT)
    times = _trusted_beliefs(hits.sum(1), (at_risk * pooled).sum(1))
    believed = np.minimum(times * pooled, RETURNS_MAX)
    return hits + POOLED_WEIGHT * believed, at_risk + POOLED_WEIGHT


def _trusted_beliefs(returned: F64Array, expected: F64Array) -> F64Array:
    """Returns `BELIEFS`, as far as observations confirm them. `expected`: the returns of each class if all were alike.

    In a working set that moves, keys used often are the next to die. Beliefs in them would keep them, since ages at
    which keys are gone have no observations.
    """
    once, more = (
        (returned[classes].sum() + TRUST_WEIGHT * before) / (expected[classes].sum() + TRUST_WEIGHT)
        for classes, before in ((slice(TURNS_MAX), 1.0), (slice(TURNS_MAX, SOON), TRUSTED_AT))
    )
    trust = min(max((more / once - 1) / (TRUSTED_AT - 1), 0.0), 1.0)
    beliefs = BELIEFS[: len(returned)]
    return np.where(beliefs > 1, beliefs**trust, beliefs)


def _in_order(hits: F64Array, at_risk: F64Array, chain: Sequence[tuple[int, int]]) -> F64Array:
    """Returns the share of keys that return, no less in a class than in those behind it.

    Two classes in the wrong order get the share of both together, as in isotonic regression.
    """
    share = hits / at_risk
    for behind, before in chain:
        together = (hits[behind] + hits[before]) / (at_risk[behind] + at_risk[before])
        wrong = share[behind] > share[before]
        share[behind, wrong] = share[before, wrong] = together[wrong]
    for behind, before in chain:  # lowering one pair may break another
        np.maximum(share[before], share[behind], out=share[before])
    return np.asarray(share)


def densities(returns: F64Array) -> F64Array:
    """Returns the hits for each slot and time, by class and the begins of buckets, and the end of the last one: none
    less than at a greater age.
    """
    density = np.empty_like(returns)
    for number, shares in enumerate(returns):  # one class at a time fits into the processor's caches
        # The share of keys left at one edge that is left at another: by logarithms, since tiny shares have lost their
        # digits.
        logs = np.concatenate((np.zeros(1), np.cumsum(np.log1p(-shares))))
        left = np.exp(np.minimum(logs - logs[:-1, None], 0.0))
        spent = np.cumsum((left[:, :-1] + left[:, 1:]) * _HALF_WIDTHS, axis=1)
        density[number] = np.divide(1 - left[:, 1:], spent, out=np.zeros_like(spent), where=_LATER).max(axis=1)
    density = np.maximum.accumulate(density[:, ::-1], axis=1)[:, ::-1]
    return np.concatenate((density, density[:, -1:]), axis=1)


class HitDensityPolicy:
    """A `Policy` with one LRU queue per class of key. The next victim is the least valuable of the queues' oldest.

    The class of a key combines its use count and its turn in the conversation, as far as the prompt shows: use counts
    fall in steps along it, one step a turn. The worth of a class at each age is learned (`HitDensity`). That is too
    slow for a sweep: a batch in a row whose keys return much later or never. Therefore the worth of keys used once
    falls as soon as few of the used keys were used before (`Returning`). A key that was not used for 2**32 ticks of the
    clock looks young again.
    """

    def __init__(self, capacity_rows: int, max_rows: int, clock: Clock | None = None) -> None:
        self._queues = RowQueues(NUM_CLASSES, max_rows)
        self._tag = np.zeros(max_rows, np.uint32)
        self._stamp = np.zeros(max_rows, np.uint32)
        self._uses = np.zeros(max_rows, np.uint8)
        self._counts = UseCounts(GHOSTS_PER_ROW * capacity_rows)
        self._returning = Returning(capacity_rows)
        self._learned = HitDensity(NUM_CLASSES, CHAIN)
        self._clock = clock or Clock()
        # By the position behind its last key: turns and uses of the last prompt that ended there. A request's new keys
        # arrive in separate calls, and continue where its known keys or its earlier chunks ended.
        self._reach = [(0, 0)] * REACH_SLOTS

    def insert(self, rows: U32Array, hashes: U64Array, positions: U32Array, begins: I64Array | None = None) -> None:
        if not len(rows):
            return
        tags = hashes.astype(np.uint32)
        self._tag[rows] = tags
        classes = self._use(rows, tags, None, positions, begins)
        self._enqueue(rows, classes, begins, self._queues.append)

    def touch(self, rows: U32Array, positions: U32Array, begins: I64Array | None = None) -> None:
        if not len(rows):
            return
        tags = self._tag[rows]
        classes = self._use(rows, tags, self._uses[rows], positions, begins)
        self._enqueue(rows, classes, begins, self._queues.move)

    def keep(self, rows: U32Array, *, soon: bool) -> None:
        """See `Policy`. Clients' expectations make separate classes, so that they count for as much as they have proved
        to be worth.

        A key that was used more often than its prompt has turns also belongs to other prompts: it is not done.
        """
        if not soon and len(rows):
            uses = self._uses[rows]
            rows = rows[uses <= 1 + np.count_nonzero(uses[1:] != uses[:-1])]
        if not len(rows):
            return
        slots, stance = self._counts.own(self._tag[rows]), SOON if soon else DONE
        self._learned.record(slots, np.zeros(len(slots), bool), np.full(len(slots), stance, np.uint8), self._clock.now)
        self._stamp[rows] = self._clock.now
        self._queues.move(stance, rows[::-1])

    def lose(self, rows: U32Array) -> None:
        self._queues.move(LOST, rows[::-1])

    def set_aside(self, rows: U32Array) -> None:
        self._queues.set_aside_each(rows, self._queues.queues_of(rows))

    def remove(self, rows: U32Array) -> None:
        """See `Policy`. The keys' use counts are remembered for a while."""
        self._queues.discard(rows)

    def victims(self, wanted: int, evictable: Callable[[U32Array], BoolArray]) -> U32Array:
        self._refresh()
        selection = Selection(wanted, evictable)
        fronts = [Front(self._queues, queue, selection.block) for queue in range(NUM_CLASSES)]
        worth = [self._worth_of(front) for front in fronts]
        while not selection.done:
            least, second = heapq.nsmallest(2, worth)
            if least == math.inf:
                break
            front = fronts[worth.index(least)]
            rows = front.rows()
            front.skip(selection.offer(self._up_to(WORTH_SLACK * second, front.queue, rows), front.queue))
            worth[front.queue] = self._worth_of(front)
        for queue, rows in selection.in_use():
            self._queues.set_aside(queue, rows)
        return selection.chosen()

    def worth(self, rows: U32Array) -> F64Array:
        self._refresh()
        queues = self._queues.queues_of(rows)
        found = self._learned.densities(queues, self._clock.ages(self._stamp[rows]))
        found[queues < TURNS_MAX] *= self._returning.factor
        return found

    def readmit(self, rows: U32Array) -> None:
        self._stamp[self._queues.readmit(rows[::-1])] = self._clock.now

    @property
    def num_aside(self) -> int:
        return self._queues.num_aside

    def resize(self, capacity_rows: int) -> None:
        """See `Policy`. The memory of use counts only grows, and growing forgets those of keys that are not held: when
        others take slabs over, the learned densities are needed to get them back.
        """
        self._returning.resize(capacity_rows)
        if slots_for(GHOSTS_PER_ROW * capacity_rows) > self._counts.num_slots:
            self._counts = UseCounts(GHOSTS_PER_ROW * capacity_rows)
            self._learned.forget_window()

    def __len__(self) -> int:
        return len(self._queues)

    def _use(
        self,
        rows: U32Array,
        tags: U32Array,
        uses: U8Array | None,
        positions: U32Array,
        begins: I64Array | None,
    ) -> U8Array:
        """Counts one more use of each key, and learns from it. Returns their classes, which fall along the prompt.

        `uses`: the previous counts; None: as remembered.
        """
        slots, known, uses = self._counts.count(tags, uses, begins)
        now: int | U32Array
        turns: int | I64Array
        if begins is None:
            turns, now = self._turns(uses, positions), self._clock.now
        else:
            many = lengths(begins, len(rows))
            turns = np.repeat(self._turns_of_each(uses, positions, begins), many)
            now = np.repeat(self._clock.now + begins, many).astype(np.uint32)  # modulo 2**32
        classes: U8Array = CLASSES[turns - 1, uses]
        self._learned.record(slots, known, classes, now)
        self._returning.record(uses)
        self._uses[rows] = uses
        self._stamp[rows] = now
        self._clock.advance(len(rows))
        return classes

    def _turns(self, uses: U8Array, positions: U32Array) -> int:
        """Returns the steps of the use counts from the prompt's begin to its last key here, 1..TURNS_MAX."""
        steps = int(np.count_nonzero(uses[1:] != uses[:-1]))
        return self._turns_by(steps, int(uses[0]), int(uses[-1]), int(positions[0]), int(positions[-1]))

    def _turns_of_each(self, uses: U8Array, positions: U32Array, begins: I64Array) -> I64Array:
        """Returns the same for several prompts."""
        ends = begins + lengths(begins, len(uses)) - 1
        steps = np.add.reduceat(changes(uses, begins), begins, dtype=np.int64)
        columns = (steps, uses[begins], uses[ends], positions[begins], positions[ends])
        found = [self._turns_by(*prompt) for prompt in zip(*(array.tolist() for array in columns), strict=True)]
        return np.array(found, np.int64)

    def _turns_by(self, steps: int, first_uses: int, last_uses: int, first: int, last: int) -> int:
        turns, uses_before = self._reach[first % REACH_SLOTS] if first else (0, 0)
        turns += int(first_uses != uses_before) + steps
        turns = max(1, min(turns, TURNS_MAX))
        self._reach[(last + 1) % REACH_SLOTS] = (turns, last_uses)
        return turns

    def _enqueue(
        self, rows: U32Array, classes: U8Array, begins: I64Array | None, put: Callable[[int, U32Array], None]
    ) -> None:
        """Puts the rows behind all others of the queues of their classes, last key first."""
        if begins is not None:
            new = changes(classes, begins)
            new[begins] = True
            rows = rows[backwards(np.flatnonzero(new), len(rows))]
            for number in np.flatnonzero(np.bincount(classes)).tolist():
                put(number, rows[classes == number])
            return
        start = 0
        ends = [*(np.flatnonzero(classes[1:] != classes[:-1]) + 1).tolist(), len(rows)]
        for end in ends:
            put(int(classes[start]), rows[start:end][::-1])
            start = end

    def _refresh(self) -> None:
        # Refreshes only where densities are read: a policy that only records uses needs none.
        if self._learned.is_stale and self._clock.take_turn():
            self._learned.refresh(self._clock.now)

    def _worth_of(self, front: Front) -> float:
        row = front.first()
        return math.inf if row == NOWHERE else self._worth_in(front.queue, row)

    def _worth_in(self, queue: int, row: int) -> float:
        density = self._learned.density(queue, (self._clock.now - int(self._stamp[row])) & TIME_MASK)
        return density * self._factor(queue)

    def _up_to(self, limit: float, queue: int, rows: U32Array) -> U32Array:
        """Returns a queue's rows worth no more than the limit, at least one: the queue is in order of age, so they come
        first.
        """
        if self._worth_in(queue, int(rows[-1])) <= limit:
            return rows
        more = self._learned.densities(queue, self._clock.ages(self._stamp[rows])) * self._factor(queue) > limit
        return rows[: max(1, int(more.argmax()))]

    def _factor(self, queue: int) -> float:
        """Returns the factor by which the keys of a queue are worth less in a sweep."""
        return self._returning.factor if queue < TURNS_MAX else 1.0


class Front:
    """The progress of one call of `victims` in one queue. Reads no more of the queue than necessary."""

    def __init__(self, queues: RowQueues, queue: int, block: Callable[[], int]) -> None:
        self.queue = queue
        self._first = queues.head(queue)
        self._blocks = queues.scan(queue, block)
        self._rows: U32Array | None = None

    def first(self) -> int:
        """Returns the oldest row not yet passed, or NOWHERE."""
        return self._first

    def rows(self) -> U32Array:
        """Returns some of the rows not yet passed, oldest first; at least one, unless `first` returns NOWHERE."""
        if self._rows is None:
            self._rows = next(self._blocks)
        return self._rows

    def skip(self, count: int) -> None:
        """Passes this number of `rows`."""
        rows = self.rows()[count:]
        self._rows = rows if len(rows) else next(self._blocks, None)
        self._first = NOWHERE if self._rows is None else int(self._rows[0])
