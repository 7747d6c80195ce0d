"""The requests of one session that are answered later, each by a task."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class PendingRequests:
    """Maps each task to the seq of the request that it answers. `seqs` is read-only for callers."""

    seqs: dict[asyncio.Task[None], int] = field(default_factory=dict)

    def add(self, task: asyncio.Task[None], seq: int) -> None:
        """Records that the task answers the request of this seq."""
        self.seqs[task] = seq
        task.add_done_callback(self.seqs.pop)

    async def finish_others(self, deadline_s: float) -> list[int]:
        """Waits for all tasks but the current one. Cancels those that are late, and returns their seqs."""
        others = {task: seq for task, seq in self.seqs.items() if task is not asyncio.current_task()}
        if not others:
            return []
        _, late = await asyncio.wait(others, timeout=deadline_s)
        for task in late:
            task.cancel()
        return [others[task] for task in late]

    def cancel(self) -> None:
        """Cancels all tasks."""
        for task in list(self.seqs):
            task.cancel()
