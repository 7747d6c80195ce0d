"""Names of objects in the remote store. Pure. The daemon and the agent make them alike.

    kvo1/<fingerprint>/era                                      pointer: names a recent era of the namespace
    kvo1/<fingerprint>/era/<generation>.<era>                   marker: this era's keys count while it exists
    kvo1/<fingerprint>/after/<generation>.<era>                 successor: names the era after this one
    kvo1/<fingerprint>/<generation>.<era>/<shape>/<group>/<key> a key with all its parts
    kvo1/kept                                                   until when the small objects are kept (Valkey alone)

Everything of an era lies below one prefix, so that one sweep ends it. Bytes are in hexadecimal; of a shape's digest
eight bytes: the object's header has all of it.
"""

from __future__ import annotations

import msgspec

PREFIX = "kvo1"
KEPT_NAME = f"{PREFIX}/kept"
"""A sorted set: names of small objects by the seconds of the server's clock until which they are kept."""
KEY_BYTES = 32
"""The size of each packed key, whatever its real width."""

FINGERPRINT_BYTES, SHAPE_BYTES, ERA_BYTES = 16, 16, 8
_SHAPE_NAME_BYTES = 8


class Space(msgspec.Struct, frozen=True):
    """The common parts of the names of a call's keys.

    `fingerprint`: of the namespace, 16 bytes; `shape`: of the group's schema and the sizes of its parts, 16 bytes;
    `generation` and `era`: of the namespace, `era` is 8 random bytes; `key_bytes`: the significant bytes of a key's 32.
    """

    fingerprint: bytes
    shape: bytes
    generation: int
    era: bytes
    group: int
    key_bytes: int


def pointer_name(fingerprint: bytes) -> str:
    """Returns the name of the small object that names an era of the namespace, from which successors lead to the
    current one.
    """
    return f"{PREFIX}/{fingerprint.hex()}/era"


def marker_name(fingerprint: bytes, generation: int, era: bytes) -> str:
    """Returns the name of the small object without which no key of the era counts."""
    return f"{PREFIX}/{fingerprint.hex()}/era/{generation:08x}.{era.hex()}"


def successor_name(fingerprint: bytes, generation: int, era: bytes) -> str:
    """Returns the name of the small object that names the era after this one, which is over."""
    return f"{PREFIX}/{fingerprint.hex()}/after/{generation:08x}.{era.hex()}"


def markers_prefix(fingerprint: bytes) -> str:
    """Returns the prefix of the names of the markers of all eras of a namespace."""
    return f"{pointer_name(fingerprint)}/"


def era_prefix(fingerprint: bytes, generation: int, era: bytes) -> str:
    """Returns the prefix of the names of all keys of an era."""
    return f"{PREFIX}/{fingerprint.hex()}/{generation:08x}.{era.hex()}/"


def key_names(space: Space, keys: bytes | memoryview) -> list[str]:
    """Returns the name of each key. `keys`: packed, 32 bytes each."""
    shape = space.shape[:_SHAPE_NAME_BYTES].hex()
    before = f"{era_prefix(space.fingerprint, space.generation, space.era)}{shape}/{space.group}/"
    digits, step, width = keys.hex(), 2 * KEY_BYTES, 2 * space.key_bytes
    return [before + digits[start : start + width] for start in range(0, len(digits), step)]
