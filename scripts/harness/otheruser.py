"""Connections that another user makes."""

from __future__ import annotations

import os

from kvoffloadd.client import Client


def connect_as(client: Client, uid: int) -> Client:
    """Connect, and return the client. The kernel notes who connects; all else goes on as before, since Python's own
    files may be for root alone.
    """
    os.seteuid(uid)
    try:
        client.connect()
    finally:
        os.seteuid(os.getuid())
    return client
