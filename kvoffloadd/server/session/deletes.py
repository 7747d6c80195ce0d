"""A session's request to delete keys."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Final

from kvoffloadd.cache.deleting import Deletion, Deletions
from kvoffloadd.cache.memory.keys import keys_array
from kvoffloadd.cache.memory.namespace import Namespace
from kvoffloadd.errors import DuplicateError, LimitError
from kvoffloadd.protocol import messages as m
from kvoffloadd.server.peers.account import Account

DELETED_KEYS_MAX: Final = 1024
"""The number of keys in one request, counted for parts as well: they are dropped in one turn of the loop."""

GROUP_KEYS_MIN: Final = 16
"""The number of keys that a group counts as, at least."""


def delete(
    message: m.Delete, namespace: Namespace, deletions: Deletions, account: Account
) -> Coroutine[Any, Any, m.Reply]:
    """Deletes the keys that a request names.

    Raises:
        DuplicateError: a group is named twice.
        KeyWidthError: the keys of a group are not whole.
        LimitError: there are too many keys, or deleted keys of the user. Nothing was deleted.
    """
    groups = [(item.group, keys_array(item.keys, namespace.key_bytes)) for item in message.groups]
    if len({group for group, _ in groups}) != len(groups):
        raise DuplicateError("a group is named twice in one request")
    known = namespace.keyspaces
    parts = [known[group].schema.parts if group in known else 1 for group, _ in groups]
    count = sum(max(len(keys) * each, GROUP_KEYS_MIN) for (_, keys), each in zip(groups, parts, strict=True))
    if count > DELETED_KEYS_MAX:
        raise LimitError(
            f"{count} keys in one delete, counted for parts as well; the cap is {DELETED_KEYS_MAX}: delete in pieces"
        )
    return _answer(message, deletions.begin(namespace, groups), deletions, account)


async def _answer(message: m.Delete, deletion: Deletion, deletions: Deletions, account: Account) -> m.Reply:
    if message.wait_s:
        await _wait(deletion, message.wait_s, deletions, account)
    return m.Deleted(
        seq=message.seq,
        keys=deletion.keys,
        bytes=deletion.bytes,
        disk_keys=deletion.disk_keys,
        unrecorded=deletions.unrecorded(deletion),
    )


async def _wait(deletion: Deletion, wait_s: float, deletions: Deletions, account: Account) -> None:
    try:
        account.charge(clears=1)
    except LimitError:  # the deletion has taken effect; the reply lists the missing records at once
        return
    try:
        await deletions.wait_recorded(deletion, wait_s)
    finally:
        account.refund(clears=1)
