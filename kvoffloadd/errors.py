"""Every error of the project, grouped by fault.

A miss is a value, never an error. Each error that can travel over the socket has a stable `code` (part of the protocol,
see docs/PROTOCOL.md), a `fault` and `retryable`; the server turns it into one error reply.
"""

from __future__ import annotations

from typing import ClassVar


class KvOffloadError(Exception):
    """Base of every error raised on purpose. Not raised itself."""

    code: ClassVar[str] = "internal"
    fault: ClassVar[str] = "daemon"
    retryable: ClassVar[bool] = False
    ends_session: ClassVar[bool] = False


class ConfigError(KvOffloadError):
    """A setting is wrong, so that the daemon refuses to start, or a client can't be made; the message names the key or
    variable, the value and the reason.
    """

    code = "config"
    fault = "operator"


class NoPlanError(ConfigError):
    """`plan` has no answer for this model: the planner does not know what it keeps, or it keeps nothing."""

    code = "no_plan"


class TryAgainError(KvOffloadError):
    """The daemon can't start now, but soon: the previous process has not ended yet."""

    code = "ending"
    fault = "operator"
    retryable = True


class UsageError(KvOffloadError):
    """The project's own code, or a user of the client library, misused an API."""

    code = "usage"
    fault = "client"


# --- the peer broke the contract -------------------------------------------------------------


class PeerError(KvOffloadError):
    """The peer's request can't be right, whatever the daemon's state. The request changed nothing.

    `seq`: the number of the request, if the protocol layer could find it; 0 otherwise.
    """

    code = "bad_request"
    fault = "client"

    def __init__(self, message: str, *, seq: int = 0) -> None:
        super().__init__(message)
        self.seq = seq


class FramingError(PeerError):
    """Bytes that are not a frame: too large, torn, not msgpack, or with too few or too many descriptors."""

    code = "bad_frame"
    ends_session = True


class MessageError(PeerError):
    """A frame that is not a message: an unknown type, or an unknown, missing or mistyped field."""

    code = "bad_message"


class StateError(PeerError):
    """A message that must not be sent in this state of the session."""

    code = "bad_state"


class VersionError(PeerError):
    """A protocol version that the daemon does not support. The message names the supported ones."""

    code = "bad_version"
    ends_session = True


class ForbiddenError(PeerError):
    """The peer's uid is not allowed to do this."""

    code = "forbidden"


class MemoryKindError(PeerError):
    """Memory that can't be registered: not sealed and of another user, not readable and writable, or not memory."""

    code = "bad_memory"


class ExtentError(PeerError):
    """A tensor or ref that extends beyond its memory as the kernel reports it, or rows that overlap."""

    code = "bad_extent"


class UnknownNameError(PeerError):
    """A registration, allocation, group, lease or job that this session does not have; names of namespaces that do not
    exist.
    """

    code = "unknown_name"


class KeyWidthError(PeerError):
    """Keys with a packed length that does not match the key width of the namespace."""

    code = "bad_key_width"


class BlockIdError(PeerError):
    """Block ids outside the registered tensors, or not `blocks_per_key` of them for each key."""

    code = "bad_block_id"


class DuplicateError(PeerError):
    """A key or a destination that is named twice in one request."""

    code = "duplicate"


class SchemaError(PeerError):
    """Groups that differ from those that the namespace already has."""

    code = "schema_mismatch"


class LeaseError(PeerError):
    """A lease that does not cover what the request names, or is of the other kind."""

    code = "bad_lease"


# --- a legal request that can't be served now --------------------------------------------------


class ResourceError(KvOffloadError):
    """A legal request that can't be served now. The request changed nothing."""

    code = "unavailable"
    retryable = True


class BusyError(ResourceError):
    """A queue is full: wait for a completion, then ask again."""

    code = "busy"
    fault = "client"


class DescriptorsLostError(ResourceError):
    """Descriptors that came with a frame are lost, since the daemon had no room for them: the stream is unusable."""

    code = "descriptors_lost"
    ends_session = True


class LimitError(ResourceError):
    """A cap of this uid, or its share of what all users have, is reached: sessions, jobs, mapped bytes, descriptors,
    leases or held memory. Others may release theirs, but it is unknown when: the client should continue without.
    """

    code = "limit"
    fault = "client"
    retryable = False


class DrainingError(ResourceError):
    """The daemon is shutting down and admits nothing new."""

    code = "draining"


class NotDurableError(ResourceError):
    """A clear took effect, but could not be recorded everywhere yet: on a disk, so that cleared keys might return after
    a restart, or in the store that hosts share, so that it applies only to this host for now. The daemon retries. Only
    clients that send no token get this error.
    """

    code = "not_durable"


class RemoteStoreError(ResourceError):
    """The remote store did not perform a request, or not in time."""

    code = "remote_store"


class DeviceError(KvOffloadError):
    """A device failed. The job that used it fails, and its blocks hold no valid data."""

    code = "device"


class InternalError(KvOffloadError):
    """A bug in the daemon. The request failed, and nothing was served from it."""


# --- worker side ---------------------------------------------------------------------------------


class ClientError(KvOffloadError):
    """Base of the errors that the client library raises for failures on the way to the daemon."""


class DaemonUnreachableError(ClientError):
    """No daemon listens at the socket, or it may not be used by this user."""

    code = "unreachable"


class DeadlineError(ClientError, TimeoutError):
    """The answer did not come in time. Jobs it concerns still own their blocks."""

    code = "deadline"


class ConnectionLostError(ClientError, ConnectionError):
    """The daemon went away during the call."""

    code = "connection_lost"


class RemoteError(ClientError):
    """An error reply. `code`, `fault` and `retryable` come from the daemon."""

    def __init__(self, code: str, message: str, fault: str, retryable: bool) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code  # type: ignore[misc] # per instance here: the daemon's value, not a class constant
        self.fault = fault  # type: ignore[misc]
        self.retryable = retryable  # type: ignore[misc]


def all_subclasses(cls: type[KvOffloadError] = KvOffloadError) -> list[type[KvOffloadError]]:
    """Returns every class of the tree below `cls`, in definition order; the protocol document is checked against it."""
    found = []
    for sub in cls.__subclasses__():
        found += [sub, *all_subclasses(sub)]
    return found
