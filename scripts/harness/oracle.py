"""What every key and every byte must be: the same as in the trials of the package."""

from __future__ import annotations

from kvoffloadd.trial.oracle import Oracle, digest, key_digests, mixed

__all__ = ["Oracle", "digest", "key_digests", "mixed"]
