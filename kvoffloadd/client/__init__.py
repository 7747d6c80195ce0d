"""The worker's side of kvoffloadd: registers a KV cache, stores and loads its blocks, and knows who owns them.

Importing this loads neither torch nor CUDA. `Client` blocks, `AsyncClient` awaits; both have the same calls.
"""

from kvoffloadd.client.aio import AsyncClient
from kvoffloadd.client.blocking import Client
from kvoffloadd.client.events import Event, EventGap, KeyEvents
from kvoffloadd.client.jobs import Job, JobConnectionLostError, JobDeadlineError, JobResult
from kvoffloadd.client.memory.kvcache import Group, KvCache, Registration
from kvoffloadd.client.memory.tensor import GpuTensor, SharedTensor
from kvoffloadd.client.memory.timeline import Ready, Timeline
from kvoffloadd.client.results import (
    Audit,
    Cleared,
    Deleted,
    Drained,
    Found,
    Lease,
    PrefetchedClaims,
    Reserved,
    Retained,
)
from kvoffloadd.model import GroupKind, KeyState, Outcome, Ref, Tier, digest_layers
from kvoffloadd.protocol.messages import ClaimFigures, KeepHow, NamespaceSpec

__all__ = [
    "AsyncClient",
    "Audit",
    "ClaimFigures",
    "Cleared",
    "Client",
    "Deleted",
    "Drained",
    "Event",
    "EventGap",
    "Found",
    "GpuTensor",
    "Group",
    "GroupKind",
    "Job",
    "JobConnectionLostError",
    "JobDeadlineError",
    "JobResult",
    "KeepHow",
    "KeyEvents",
    "KeyState",
    "KvCache",
    "Lease",
    "NamespaceSpec",
    "Outcome",
    "PrefetchedClaims",
    "Ready",
    "Ref",
    "Registration",
    "Reserved",
    "Retained",
    "SharedTensor",
    "Tier",
    "Timeline",
    "digest_layers",
]
