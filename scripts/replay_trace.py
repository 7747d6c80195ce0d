#!/usr/bin/env python3
"""Replay a trace of real requests (Mooncake's JSONL) through a real daemon, every loaded byte checked.

Each block id of the trace (512 tokens) is a key; what its payload must be is a function of the key. A request pins its
keys, stores those behind the prefix that hits, loads that prefix into other blocks, and compares every byte. Several
workers take the requests in the trace's order: a turn covers `pin` and the admission of the store, so that what is held
or pending at each request is what it was in the trace; copies, waiting and comparing overlap. A reference hits if its
block and all before it in the request are held; it is pending if they are held or being stored, and one is the latter.

Hit rates stand beside those of LRU, of Belady's clairvoyant policy, and of a cache without bounds (ceiling). Exit status
0 only if no byte was wrong, something was checked, and the daemon's self-audit found nothing; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from _bench import print_grid
from _daemon import DaemonError, DaemonProcess, private_folder
from _oracle import Oracle, digest, mixed
from _output import Live, print_json
from _trace import belady_hits, ceiling_hits, load_trace, lru_hits

from kvoffloadd.client import Client, Group, GroupKind, KeyState, KvCache, NamespaceSpec, Outcome, Ref, SharedTensor
from kvoffloadd.errors import KvOffloadError
from kvoffloadd.model import PAGE_BYTES, slot_pages
from kvoffloadd.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from kvoffloadd.client import Job
    from kvoffloadd.model import BoolArray, I64Array, U8Array
