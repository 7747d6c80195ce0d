"""A session's wait for jobs."""

from __future__ import annotations

from kvoffloadd.cache.jobs.jobs import Jobs
from kvoffloadd.cache.progress import Progress
from kvoffloadd.errors import BusyError, LimitError
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.peers.account import Account


async def drain(
    message: m.Drain, jobs: Jobs, account: Account, progress: Progress, last: int, uid: int | None
) -> m.Reply:
    """Waits for the jobs up to number `last` that `progress` counts. `uid`: the user whose payloads without a checksum
    are counted; None: those of all users. Raises BusyError if the user waits too often.
    """
    try:
        account.charge(drains=1)
    except LimitError as error:
        raise BusyError(str(error)) from None
    try:
        settled = await jobs.drain(progress, last, message.deadline_s)
    finally:
        account.refund(drains=1)
    unsealed = jobs.sealing.unsealed if uid is None else jobs.sealing.by_uid[uid]
    return m.Drained(seq=message.seq, jobs=progress.left(last), unsealed=0 if settled else unsealed)
