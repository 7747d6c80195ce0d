"""Whatever changes the bytes of a page changes the namespace."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest

from kvoffloadd.client import GroupKind, NamespaceSpec
from kvoffloadd.errors import UsageError
from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.common.naming import digest_of
from kvoffloadd.integrations.sglang import versions
from kvoffloadd.integrations.sglang.hostpool import host_pools
from kvoffloadd.integrations.sglang.namespace import Computed, namespace_of
from kvoffloadd.integrations.sglang.options import LinkerOptions, StorageOptions
from kvoffloadd.integrations.sglang.pools import TpRank
from tests.integrations.sglang.fakes import HostPool, MambaPoolHost, MHATokenToKVPoolHost

ARGUMENTS: dict[str, Any] = {
    "model_path": "org/model",
    "device": "cuda",
    "dtype": "bfloat16",
    "kv_cache_dtype": "auto",
}


def named(pool: HostPool | None = None, *, tp: int = 1, **changed: Any) -> NamespaceSpec:
    pools = host_pools({"kv": pool or MHATokenToKVPoolHost(4, 64, [4096, 4096])}, TpRank(0, tp), replicated=False)
    return namespace_of(replace(COMPUTED, **changed), pools, tp)


COMPUTED = Computed(ARGUMENTS, ("identity",), "0.5.23")


def test_engines_that_differ_in_nothing_share_one() -> None:
    other_size = MHATokenToKVPoolHost(9, 64, [4096, 4096])
    assert named() == named(other_size), "how many pages a pool has is nobody's business"


def test_the_name_of_a_folder_is_there_to_be_read() -> None:
    """What is in it is in the identity: an engine in a container has it at another place."""
    there = named(arguments=ARGUMENTS | {"model_path": "/mnt/models/model/"})
    assert there == named()
    assert there.model == "model"


def test_whatever_decides_the_bytes_counts() -> None:
    found = {
        named(),
        named(tp=2),
        named(identity=("another",)),
        named(release="0.5.24"),
        named(amx=True),
        named(arguments=ARGUMENTS | {"device": "cpu"}),
        named(arguments=ARGUMENTS | {"device": "cpu"}, amx=True),
        named(arguments=ARGUMENTS | {"dtype": "float16"}),
        named(arguments=ARGUMENTS | {"kv_cache_dtype": "fp8_e4m3"}),
        named(MHATokenToKVPoolHost(4, 32, [2048, 2048])),
        named(MHATokenToKVPoolHost(4, 64, [4096, 2048])),
    }
    assert len(found) == 11


@pytest.mark.parametrize(("states", "same"), [({}, True), ({"mamba": MambaPoolHost(5, 1, [300, 200])}, False)])
def test_models_with_states_have_names_of_their_own(states: dict[str, HostPool], *, same: bool) -> None:
    """Earlier builds registered states as keys and values: a group of another kind, which the daemon would refuse in
    their namespace. Other models keep what they have stored.
    """
    pools = host_pools({"kv": MHATokenToKVPoolHost(4, 64, [4096, 4096]), **states}, TpRank(0, 1), replicated=False)
    kinds = [group.kind for group in pools.caches.groups]
    assert kinds == [GroupKind.FULL, *[GroupKind.MAMBA] * len(states)]
    layout = namespace_of(COMPUTED, pools, 1).layout
    assert (layout.split()[-1] == digest_of(pools.shapes)) == same


def test_options() -> None:
    assert StorageOptions.of({"interface_v1": 1, "timeout_s": 2}).timeout_s == 2.0
    assert StorageOptions.of({"interface_v1": 1, "wait_s": 3}).wait_s == 3.0
    assert StorageOptions.of({"interface_v1": 1, "fingerprint": "contents"}).fingerprint is Fingerprint.CONTENTS
    assert LinkerOptions.of({"fingerprint": "contents"}).fingerprint is Fingerprint.CONTENTS
    with pytest.raises(UsageError, match="fingerprint must be 'auto' or 'contents', not 'size'"):
        LinkerOptions.of({"fingerprint": "size"})
    with pytest.raises(UsageError, match="interface_v1"):
        StorageOptions.of({})
    with pytest.raises(UsageError, match="job_deadline_s"):
        StorageOptions.of({"interface_v1": 1, "job_deadline_s": 0})


def test_releases_that_were_not_tried_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: "0.5.23+local")
    assert versions.check() == "0.5.23+local"
    for other in ("0.5.22", "0.5.24", "0.6.0"):
        monkeypatch.setattr(metadata, "version", lambda _, other=other: other)
        with pytest.raises(ImportError, match=f"supports SGLang 0.5.23; installed is {other}"):
            versions.check()


def test_without_sglang_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ImportError, match="not installed"):
        versions.check()
