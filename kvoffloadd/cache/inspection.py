"""Inspection: every record that the catalog names is read from disk and checked, while the daemon serves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvoffloadd.cache.ghosts import Reason

if TYPE_CHECKING:
    from kvoffloadd.cache.disk import Disk

CHUNK_RECORDS = 256
FINDINGS_MAX = 1000


class Inspection:
    """Reads behind all that anybody waits for."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    async def run(self, *, repair: bool) -> tuple[int, list[str]]:
        """Records read, and what is wrong with them; with `repair` the bad ones are dropped. What goes or moves
        meanwhile is not judged.
        """
        catalog, count = self._disk.catalog, 0
        findings: list[str] = []
        for root in self._disk.roots:
            for segment in list(root.segments.values()):
                records = catalog.in_segment(segment.ordinal)
                for at in range(0, len(records), CHUNK_RECORDS):
                    some = records[at : at + CHUNK_RECORDS]
                    some = some[(catalog.segment[some] == segment.ordinal) & (catalog.page[some] != 0)]
                    if not len(some) or not root.holds(segment):
                        continue
                    pages = catalog.page[some].copy()
                    try:
                        good = await root.reader.inspect(segment, pages)
                    except OSError as error:
                        findings.append(f"disk: {len(some)} records of {root.path}/segments/{segment.name}: {error}")
                        continue
                    same = (catalog.segment[some] == segment.ordinal) & (catalog.page[some] == pages)
                    bad = some[~good & same]
                    count += len(some)
                    for record in bad.tolist()[: max(FINDINGS_MAX - len(findings), 0)]:
                        place = f"{root.path}/segments/{segment.name}, page {int(catalog.page[record])}"
                        findings.append(f"disk: the record at {place} is damaged{', dropped' if repair else ''}")
                    if repair and len(bad):
                        self._disk.promotion.counters.damaged += len(bad)
                        self._disk.lose(np.asarray(bad), Reason.CORRUPT)
        return count, findings
