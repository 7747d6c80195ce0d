"""The tail of a prompt: the tokens behind its last whole chunk, under a key that belongs to this prompt alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvoffloadd.integrations.vllm.blocks import NULL_BLOCK

_NAME_BYTES_MAX = 64


def tail_name(prompt_hash: bytes, tokens: int) -> bytes:
    """Returns a name as long as a block hash, and never equal to one, made of `prompt_hash`, which covers all the
    prompt's tokens, and of their number.
    """
    size = min(len(prompt_hash), _NAME_BYTES_MAX)
    salt = tokens.to_bytes(8, "little")
    return hashlib.blake2b(prompt_hash, digest_size=size, salt=salt, person=b"kvoffloadd tail").digest()


@dataclass(frozen=True, slots=True)
class HandedPrompt:
    """A prompt that one engine computes and another one answers.

    The second one computes the last token in any case, for the token that comes after it; all before is loaded.

    `name`: of its tails, one in each group. `tokens`: all of them.
    """

    name: bytes
    tokens: int

    @property
    def loaded_tokens(self) -> int:
        """How many tokens the second engine does not compute."""
        return self.tokens - 1

    def whole_chunks(self, tokens_per_chunk: int) -> int:
        """Returns how many chunks of a group end before the last token. One that ends with it counts as a tail: of
        windows and states vLLM keeps what serves a hit of whole chunks, and a prompt never hits up to its end.
        """
        return self.loaded_tokens // tokens_per_chunk

    def has_tail(self, tokens_per_chunk: int) -> bool:
        """Returns whether whole chunks of this size leave something to load."""
        return self.loaded_tokens % tokens_per_chunk > 0

    def needed_chunks(self, tokens_per_chunk: int, local_tokens: int, window_chunks: int | None) -> slice:
        """Returns the whole chunks that are loaded before the tail: not those of `local_tokens`, which the engine has,
        and of a window only those among the last `window_chunks`, the tail's included.
        """
        first = local_tokens // tokens_per_chunk
        if window_chunks is not None:
            first = max(first, -(-self.loaded_tokens // tokens_per_chunk) - window_chunks)
        return slice(first, self.whole_chunks(tokens_per_chunk))


def filled(blocks: Sequence[int], blocks_per_key: int) -> list[int]:
    """Returns all blocks of a key: the last one stands for those that are not there, or have slid out of a window.

    The bytes that are stored for them are never loaded. `blocks`: the tail's, the last one holds its last token.
    """
    last = blocks[-1]
    return [last if block == NULL_BLOCK else block for block in blocks] + [last] * (blocks_per_key - len(blocks))
