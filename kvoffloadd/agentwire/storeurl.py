"""Splits the URL of a Valkey or Redis server. The schemes are those of the two projects' own clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote, urlsplit

_PORT: Final = 6379
_FORMS: Final = "must be redis://HOST:PORT/DB, rediss://HOST:PORT/DB (TLS), or unix:///PATH"
_IS_TLS: Final = {"redis": False, "valkey": False, "rediss": True, "valkeys": True, "unix": False}


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """The parts of a URL. `path`: of the server's Unix socket; empty: it listens at `host` and `port`."""

    host: str
    port: int
    path: str
    is_tls: bool
    database: int
    user: str
    password: str


def split_store_url(text: str) -> StoreUrl:
    """Returns the parts of a URL. Raises ValueError, without the text: it may contain a password."""
    try:
        url = urlsplit(text)
        local = url.scheme == "unix"
        host, path = (url.hostname or "", url.path if local else "")
        port = _PORT if url.port is None else url.port
        number = "0" if local else url.path.strip("/") or "0"
        is_tls = _IS_TLS.get(url.scheme)
    except ValueError:
        raise ValueError(_FORMS) from None
    if local:
        is_whole = path.startswith("/") and bool(path.strip("/")) and not host and url.port is None
    else:
        is_whole = bool(host) and number.isascii() and number.isdigit() and len(number) < 10
    if is_tls is None or port == 0 or not is_whole:
        raise ValueError(_FORMS)
    user, password = unquote(url.username or ""), unquote(url.password or "")
    return StoreUrl(host, 0 if local else port, path, is_tls, int(number), user, password)
