"""Arguments of SGLang that users of the storage need not give."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvoffloadd.integrations.sglang.flags import completed
from kvoffloadd.sglangnames import PACKAGE

OURS = {"module_path": PACKAGE, "class_name": "KVOffloaddStorage"}
KEYS = {"backend_name": "kvoffloadd", "interface_v1": 1, "allocator": "shm"}


def arguments(config: Any, layout: str = "page_first", backend: str | None = "dynamic") -> dict[str, Any]:
    text = config if config is None or isinstance(config, str) else json.dumps(config)
    return {
        "hicache_storage_backend": backend,
        "hicache_storage_backend_extra_config": text,
        "hicache_mem_layout": layout,
    }


def test_what_has_one_value_is_set() -> None:
    found = completed(arguments(OURS | {"socket": "/s"}))
    assert json.loads(found.pop("hicache_storage_backend_extra_config")) == OURS | KEYS | {"socket": "/s"}
    assert found == {"hicache_mem_layout": "page_first_direct", "hicache_io_backend": "direct"}


def test_what_is_given_stays() -> None:
    assert completed(arguments(OURS | KEYS, "page_first_direct")) == {}
    assert completed(arguments(OURS | KEYS, "layer_first")) == {}, "it is refused by its name later"
    found = completed(arguments(OURS | {"allocator": "default"}, "layer_first"))
    assert json.loads(found["hicache_storage_backend_extra_config"])["allocator"] == "default"


@pytest.mark.parametrize(
    "given",
    [
        arguments(OURS, backend="file"),
        arguments(OURS, backend=None),
        arguments(None),
        arguments("@file"),
        arguments([OURS]),
        arguments(OURS | {"class_name": "Another"}),
        arguments({"module_path": "another"}),
    ],
)
def test_other_storages_are_left_alone(given: dict[str, Any]) -> None:
    assert completed(given) == {}
