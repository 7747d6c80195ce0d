"""The states of a connection, and the rule for when its socket is read.

    OPEN --bytes--> SERVING --all frames that are whole are served--> OPEN
                       |--and a large one has begun, without room---> NO_ROOM --room--> OPEN
                       |--the turn is over--------------------------> QUEUED ---turn--> SERVING
                       +--and the peer reads no replies-------------> HELD_UP --they are read--> QUEUED

Bytes that come during another session's turn first lead from OPEN to QUEUED. Every state leads to ENDING, which is
final.
"""

from __future__ import annotations

import enum


class Input(enum.Enum):
    """The state of the data that the peer sends."""

    __hash__ = object.__hash__  # that of Enum runs in Python, for each request

    OPEN = "open"  # every whole frame is served
    SERVING = "serving"  # the session has its turn
    QUEUED = "queued"  # frames, or a request that has begun, wait for the session's turn
    HELD_UP = "held up"  # frames wait until the peer reads its replies; nothing has begun
    NO_ROOM = "no room"  # the rest of a large frame waits for memory that the user's other frames take
    ENDING = "ending"  # the session ends: no further requests are served


class Output(enum.Enum):
    """Whether the peer keeps up with the data that it is sent."""

    __hash__ = object.__hash__  # that of Enum runs in Python, for each request

    FLOWING = "flowing"
    CONGESTED = "congested"  # too slow for further requests


class Intake(enum.Enum):
    """The treatment of further data from the peer."""

    READ = "read"  # read it; a frame that has begun, and the hello, must come in time
    REST = "rest"  # leave it in the socket; no frame is late meanwhile
    PRESS = "press"  # as REST, but a large frame, which may keep others waiting for room, must come in time
    STAY = "stay"  # continue as before
    STOP = "stop"  # leave it there for good


INTAKES: dict[Input, dict[Output, Intake]] = {
    Input.OPEN: {Output.FLOWING: Intake.READ, Output.CONGESTED: Intake.PRESS},
    Input.SERVING: {Output.FLOWING: Intake.STAY, Output.CONGESTED: Intake.STAY},
    Input.QUEUED: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.HELD_UP: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.NO_ROOM: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.ENDING: {Output.FLOWING: Intake.STOP, Output.CONGESTED: Intake.STOP},
}
"""The socket is read in one case only: all received frames are served, and the peer reads its replies."""
