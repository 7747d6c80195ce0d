"""A fair queue: the flow that has been served least goes next, however much each has queued. Pure: no clock, no thread.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), on each level of a tree. A flow's start tag is the virtual time
at which its next turn is due; the flow with the smallest goes, and its tag moves on by the turn's cost times the flow's
divisor. A flow that was idle is due at once, at the queue's virtual time, but not before it has paid for earlier turns.

Two rules are added. A flow with a divisor above 1 begins as far behind as its later turns are apart, so that less
urgent work does not begin with a turn that it could not have later. And virtual time advances with work done, if more
slowly than tags do, so that an endless series of newcomers, each due at once, can't keep waiting flows from their turn.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import count, pairwise
from typing import Generic, TypeVar

Item = TypeVar("Item", bound="Hashable")

NEWCOMERS_SHARE = 8
"""An endless series of newcomers takes at most about this multiple of a waiting flow's share."""


class _Flow(Generic[Item]):
    """A node of the tree: those of the lowest level have items, the others have flows. It stands in its parent's heap
    by `start` from its first item on, also without items, until virtual time has reached its tag.
    """

    __slots__ = ("active", "divisor", "flows", "heap", "items", "key", "queued", "stands", "start", "virtual")

    def __init__(self, key: Hashable, divisor: int) -> None:
        self.key = key
        self.divisor = divisor
        self.queued = 0  # items in it and below
        self.items: OrderedDict[Item, int] = OrderedDict()  # with the cost of each turn
        # Its place in the parent's order:
        self.start = 0
        self.stands = -1  # number of its valid entry in the parent's heap
        # The flows below it:
        self.flows: dict[Hashable, _Flow[Item]] = {}
        self.heap: list[tuple[int, int, _Flow[Item]]] = []
        self.active = 0  # flows with items
        self.virtual = 0


class FairQueue(Generic[Item]):
    """Items wait in flows, and are taken from them in turn. A flow is named by a path from the root: on each level a
    key and a divisor; all paths are of one length. Siblings of the divisors 1 and n share as n to 1, in costs. Items of
    one flow are first in, first out.

    `turn_cost`: the cost of a usual turn. Not thread-safe.
    """

    def __init__(self, turn_cost: int) -> None:
        self._turn_cost = turn_cost
        self._root: _Flow[Item] = _Flow(None, 1)
        self._places: dict[Item, list[list[_Flow[Item]]]] = {}  # for each item its flows, each as a path from the root
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Item]:
        """Yields items in the order of their `push`."""
        return iter(self._places)

    def __contains__(self, item: Item) -> bool:
        return item in self._places

    def push(self, path: Sequence[tuple[Hashable, int]], item: Item, cost: int) -> None:
        """Queues the item behind all others of its flow. `cost`: that of its turn, at least 1.

        An item that is queued in another flow waits in both, and leaves with the first flow that has its turn, which
        pays.
        """
        flow = self._root
        place = [flow]
        for key, divisor in path:
            below = flow.flows.get(key)
            if below is None:
                below = flow.flows[key] = _Flow(key, divisor)
            flow = below
            place.append(flow)
        if item in flow.items:
            return
        flow.items[item] = cost
        self._places.setdefault(item, []).append(place)
        for above, flow in pairwise(place):
            flow.queued += 1
            if flow.queued == 1:
                above.active += 1
                due = above.virtual + self._turn_cost * (flow.divisor - 1)
                if flow.stands < 0 or flow.start < due:
                    self._stand(above, flow, due)

    def take(self) -> Item | None:
        """Removes and returns the next item; None if there is none."""
        if not self._places:
            if self._root.flows:  # no flow waits: the next to come are equals
                self._root = _Flow(None, 1)
            return None
        flow = self._root
        place = [flow]
        while flow.flows:
            flow = self._due(flow)
            place.append(flow)
        item, cost = next(iter(flow.items.items()))
        for above, flow in pairwise(place):
            passed = cost // (NEWCOMERS_SHARE * above.active)
            above.virtual = max(above.virtual + passed, flow.start)
            self._stand(above, flow, flow.start + cost * flow.divisor)
        self.remove(item)
        return item

    def remove(self, item: Item) -> bool:
        """Drops the item, at no cost to its flow. Returns False if it is not queued."""
        places = self._places.pop(item, None)
        if places is None:
            return False
        for place in places:
            del place[-1].items[item]
            for above, flow in pairwise(place):
                flow.queued -= 1
                if not flow.queued:
                    above.active -= 1
        return True

    def _stand(self, above: _Flow[Item], flow: _Flow[Item], start: int) -> None:
        flow.start, flow.stands = start, next(self._numbers)
        heapq.heappush(above.heap, (start, flow.stands, flow))

    @staticmethod
    def _due(above: _Flow[Item]) -> _Flow[Item]:
        """Returns the flow below that is due next. Drops flows that have paid for all turns, and have no items."""
        while True:
            _, number, flow = above.heap[0]
            if number == flow.stands and flow.queued:
                return flow
            heapq.heappop(above.heap)
            if number == flow.stands:
                del above.flows[flow.key]
