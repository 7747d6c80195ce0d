"""What each system is asked to do, and with what: the same for all.

It runs in any system's own Python, and so needs numpy alone.

A *prompt* is tokens that were not asked before; its KV is as many chunks of as many bytes in every system. *Tokens
found* are counted in whole chunks from the prompt's begin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

U8Array = NDArray[np.uint8]
I64Array = NDArray[np.int64]

VOCABULARY = 128_000


class NotOfferedError(Exception):
    """A system has no such thing, or not on a machine like this; the message has the reason, for the report."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A model's KV cache as an engine keeps it: in each layer `blocks` blocks, each K and V of `block_tokens`, bf16."""

    layers: int
    kv_heads: int
    head_size: int
    block_tokens: int
    chunk_tokens: int
    blocks: int

    @property
    def block_bytes(self) -> int:
        """Returns the bytes of a block in one layer."""
        return 2 * 2 * self.block_tokens * self.kv_heads * self.head_size

    @property
    def token_bytes(self) -> int:
        """Returns the bytes of a token in all layers."""
        return self.layers * self.block_bytes // self.block_tokens

    @property
    def chunk_blocks(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.chunk_tokens * self.token_bytes


@dataclass(frozen=True, slots=True)
class SystemSetting:
    """One system. `folder`: for sockets and logs, with a short path. `disk`: an empty folder on a disk; None: memory
    alone. `threads`: wherever a system has a setting for them. `verified`: checksums wherever the system has them, also
    those that are off by default.
    """

    geometry: ModelGeometry
    folder: Path
    disk: Path | None
    memory_bytes: int
    disk_bytes: int
    threads: int
    verified: bool = False


@dataclass(frozen=True)
class Prompt:
    """The prompt of this number, with `tokens` tokens: whole chunks."""

    number: int
    tokens: int
    chunk_tokens: int

    @property
    def name(self) -> str:
        """Unlike any other prompt's."""
        return f"prompt-{self.number}-{self.tokens}"

    @property
    def chunks(self) -> int:
        return self.tokens // self.chunk_tokens

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """What the engine's tokenizer has made of it."""
        rng = np.random.default_rng((self.number, self.tokens))
        return tuple(rng.integers(0, VOCABULARY, self.tokens).tolist())

    @cached_property
    def names(self) -> tuple[bytes, ...]:
        """A name of 32 bytes for each chunk, which stands for all tokens up to its end. An engine's own prefix cache
        has such names already when it asks a connector.
        """
        tokens = np.asarray(self.token_ids, np.uint32).reshape(self.chunks, self.chunk_tokens)
        names, above = [], b""
        for chunk in tokens:
            above = hashlib.sha256(above + chunk.tobytes()).digest()
            names.append(above)
        return tuple(names)


class System(Protocol):
    """One system, with the engine's side of it in this process. Every call ends within its own time limit, or raises.

    Calls raise NotOfferedError for what the system does not have.
    """

    def start(self) -> None:
        """Starts the system, and waits until it can be asked: its processes are up, the engine's
        memory is known to it.
        """

    def versions(self) -> dict[str, str]:
        """Returns the versions of its packages."""

    def memory(self) -> Sequence[U8Array]:
        """The engine's KV cache: u8 (blocks, `block_bytes`) of each layer. Another one after a restart."""

    def ping(self) -> None:
        """The least that its other side can be asked. Returns with the answer."""

    def store(self, prompt: Prompt, blocks: I64Array) -> bool:
        """The prompt's KV from these blocks. Returns when they may be written over; False: it was refused, in part or
        as a whole.
        """

    def lookup(self, prompt: Prompt) -> int:
        """Tokens that a `load` would find, and keeps for it. From disk, too: some bring them to memory meanwhile."""

    def load(self, prompt: Prompt, blocks: I64Array, found: int) -> int:
        """The `found` tokens that the `lookup` right before has found, into the first of these blocks. Returns how many
        of them are there now, as the system reports.
        """

    def release(self, prompt: Prompt) -> None:
        """Nothing of it is wanted any more."""

    def settle(self) -> None:
        """Waits until all that was stored is on disk."""

    def forget(self) -> None:
        """Nothing in memory any more: what is found then is on disk."""

    def restart(self, *, kill: bool) -> None:
        """End what is meant to outlast engines, by SIGKILL or in order, and start it again, until it can be asked."""

    def processes(self) -> Sequence[int]:
        """Whose memory holds payloads."""

    def stop(self) -> None:
        """Whatever state it is in."""
