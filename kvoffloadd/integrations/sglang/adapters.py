"""Names LoRA adapters in the names of pages by their contents, since SGLang names them by name and path.

SGLang puts an adapter's id behind the extra key of its requests, and both into the names of their pages. An adapter
that is trained again at its place keeps its id, and a base request with that id as its extra key has the adapter's
names. So requests get other extra keys: those of an adapter with its contents, others with none that looks alike.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from kvoffloadd.integrations.common.contents import ContentsError, Fingerprint
from kvoffloadd.integrations.common.naming import digest_of
from kvoffloadd.integrations.sglang.files import FilesAtStart, Source

logger = logging.getLogger("sglang.kvoffloadd")

_MARK = "kvoffloadd-adapter:"
_NONE = "-"
_CONFIG = "adapter_config.json"


class LoadedAdapters:
    """Knows the contents of the adapters that this process has loaded, by SGLang's ids. All methods come from one
    thread.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, str] = {}

    @contextmanager
    def loading(self, lora_id: str, path: str) -> Iterator[None]:
        """Surrounds SGLang's reading of an adapter's files. Any earlier name for that id is dropped."""
        self._by_id[lora_id] = _nobodys()
        files = FilesAtStart(_CONFIG)
        source = Source(path, hub=True)
        files.look([source])
        yield
        try:
            # They have just been read: their bytes cost little, and name them on other hosts, too.
            self._by_id[lora_id] = digest_of(files.identity(source, Fingerprint.CONTENTS))
        except ContentsError as error:
            logger.warning("kvoffloadd: no other engine shares pages of the adapter %s: %s", lora_id, error)

    def received(self, lora_id: str) -> None:
        """Names an adapter that comes as tensors. SGLang gives each such adapter an id that none has had."""
        self._by_id[lora_id] = digest_of(lora_id)

    def extra_key(self, extra_key: str | None, lora_id: str | None) -> str | None:
        """Returns another extra key in place of SGLang's, which has `lora_id` at its end where there is one."""
        if lora_id is None:
            if extra_key is None or not extra_key.startswith(_MARK):
                return extra_key
            return f"{_MARK}{_NONE}{extra_key}"
        contents = self._by_id.setdefault(lora_id, _nobodys())
        return f"{_MARK}{contents}{extra_key or lora_id}"


def _nobodys() -> str:
    """Returns a name as long as a digest, so that nothing behind it can be taken for a part of it."""
    return secrets.token_hex(16)


ADAPTERS = LoadedAdapters()
"""This process's adapters; the process has one rank. `engine.watch_start` reports loads to it."""
