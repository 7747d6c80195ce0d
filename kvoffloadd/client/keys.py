"""Converts keys and block ids between numpy and the wire's packed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffloadd.errors import MessageError, UsageError
from kvoffloadd.model import NO_BLOCK, KeyState, U8Array, U32Array

Keys = bytes | bytearray | memoryview | U8Array
"""Packed keys, or a u8 array (keys, key_bytes)."""

BlockIds = npt.NDArray[np.integer[Any]] | Sequence[int]
"""Block ids (keys,) or (keys, blocks_per_key); `model.NO_BLOCK` means that this block of the key is not wanted."""

_KEY_STATES = bytes(KeyState)


def pack_keys(keys: Keys, key_bytes: int) -> bytes:
    """Packs the keys, one after the other. Raises UsageError if they are not `key_bytes` wide."""
    if isinstance(keys, np.ndarray):
        if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != key_bytes:
            raise UsageError(f"keys must be u8 arrays of shape (n, {key_bytes}), not {keys.dtype} {keys.shape}")
        return keys.tobytes()
    try:
        packed = bytes(memoryview(keys))  # not bytes(keys), which would take an int for a length
    except TypeError as error:
        raise UsageError(f"keys must be bytes or a u8 array (n, {key_bytes}), not {type(keys).__name__}") from error
    if len(packed) % key_bytes:
        raise UsageError(f"{len(packed)} bytes of keys are not a multiple of the key width {key_bytes}")
    return packed


def unpack_keys(packed: bytes, key_bytes: int) -> U8Array:
    """Returns u8 (keys, key_bytes). Raises MessageError if the daemon's bytes don't fit the width."""
    if len(packed) % key_bytes:
        raise MessageError(f"{len(packed)} bytes of keys are not a multiple of the key width {key_bytes}")
    return np.frombuffer(packed, np.uint8).reshape(-1, key_bytes)


def pack_blocks(block_ids: BlockIds, keys: int, blocks_per_key: int) -> bytes:
    """Packs the ids as little-endian u32. Raises UsageError unless they are integers in u32 range, of the right
    count.
    """
    ids = block_ids if isinstance(block_ids, np.ndarray) else _from_sequence(block_ids)
    if ids.dtype.kind not in "iu":
        raise UsageError(f"block ids must be integers, not {ids.dtype}")
    shapes = ((keys,), (keys, 1)) if blocks_per_key == 1 else ((keys, blocks_per_key),)
    if ids.shape not in shapes:
        raise UsageError(f"block ids of shape {ids.shape}; {keys} keys of {blocks_per_key} blocks need {shapes[-1]}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) > NO_BLOCK):
        raise UsageError(f"block ids from {ids.min()} to {ids.max()} do not fit u32")
    return ids.astype("<u4").tobytes()


def _from_sequence(block_ids: Sequence[int]) -> npt.NDArray[Any]:
    """Converts a list, which is slow but allowed; numpy would accept a bool among integers."""
    try:
        ids = np.asarray(block_ids)
    except ValueError as error:
        raise UsageError(f"block ids must be an array of integers: {error}") from None
    if ids.size == 0:
        return ids.astype(np.uint32)
    if any(isinstance(item, (bool, np.bool_)) for item in np.asarray(block_ids, dtype=object).flat):
        raise UsageError("block ids must be integers, not bool")
    return ids


def unpack_states(states: list[bytes], counts: tuple[int, ...]) -> list[U8Array]:
    """Returns u8 per key and group. Raises MessageError where the daemon's answer doesn't fit the request."""
    if tuple(map(len, states)) != counts:
        raise MessageError(f"the reply has states for {tuple(map(len, states))} keys; the request named {counts}")
    # Checks bytes: for a few keys numpy takes longer.
    if any(packed.translate(None, delete=_KEY_STATES) for packed in states):
        raise MessageError("an unknown key state")
    return [np.frombuffer(packed, np.uint8) for packed in states]


def unpack_u32(packed: bytes, what: str) -> U32Array:
    """Returns u32 (n,). Raises MessageError."""
    if len(packed) % 4:
        raise MessageError(f"{what}: {len(packed)} bytes are not a u32 array")
    return np.frombuffer(packed, "<u4").astype(np.uint32, copy=False)
