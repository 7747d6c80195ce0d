"""Scrub: reads every record that the catalog names from disk and checks it, while the daemon serves."""

from __future__ import annotations

import numpy as np

from kvoffloadd.cache.disk.contents import DiskContents
from kvoffloadd.cache.disk.promotion import PIECE_BYTES, PIECE_RECORDS, PromotionCounters
from kvoffloadd.cache.stats.missreasons import Reason
from kvoffloadd.model import DROPPED, PAGE_BYTES, I64Array
from kvoffloadd.storage.disk.segment import Segment
from kvoffloadd.storage.hashing import in_turns

FINDINGS_MAX = 1000


class Scrub:
    """Scrubs all roots; its reads come after all others."""

    def __init__(self, disk: DiskContents, counters: PromotionCounters) -> None:
        self._disk = disk
        self._counters = counters

    async def run(self, *, repair: bool) -> tuple[int, list[str]]:
        """Reads all records. Returns their number and a list of errors; with `repair` bad records are dropped. Records
        that are dropped or rewritten in the meantime are not judged.
        """
        catalog, count = self._disk.catalog, 0
        findings: list[str] = []
        for root in self._disk.roots:
            folder = f"{root.name}/segments"
            for segment in list(root.pool.segments.values()):
                records = catalog.in_segment(segment.ordinal)
                sizes = self._sizes(segment, records)
                for turn in in_turns(np.arange(len(sizes)), sizes, PIECE_BYTES, PIECE_RECORDS):
                    here = (catalog.segment[records[turn]] == segment.ordinal) & (catalog.page[records[turn]] != 0)
                    batch, cost_bytes = records[turn][here], int(sizes[turn][here].sum())
                    if not len(batch) or not root.holds(segment):
                        continue
                    pages = catalog.page[batch].copy()
                    try:
                        good = await root.reader.inspect(segment, pages, cost_bytes)
                    except OSError as error:
                        findings.append(f"disk: {len(batch)} records of {folder}/{segment.name}: {error}")
                        continue
                    same = (catalog.segment[batch] == segment.ordinal) & (catalog.page[batch] == pages)
                    bad = batch[~good & same]
                    count += len(batch)
                    for record in bad.tolist()[: max(FINDINGS_MAX - len(findings), 0)]:
                        place = f"{folder}/{segment.name}, page {int(catalog.page[record])}"
                        findings.append(f"disk: the record at {place} is damaged{DROPPED if repair else ''}")
                    if repair and len(bad):
                        self._counters.damaged += len(bad)
                        self._disk.lose(np.asarray(bad), Reason.CORRUPT)
        return count, findings

    def _sizes(self, segment: Segment, records: I64Array) -> I64Array:
        """Returns the bytes from each of these records of a segment, which come by page, to the next. This is an upper
        bound of the record's size, which may not be known since the start. The sum is at most the size of the segment.
        """
        ends = np.append(self._disk.catalog.page[records], segment.size_bytes // PAGE_BYTES).astype(np.int64)
        sizes: I64Array = np.diff(ends) * PAGE_BYTES
        return sizes
