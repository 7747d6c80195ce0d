"""Where a connection stands, and when its socket is read.

    OPEN --bytes--> SERVING --all frames that are whole are served--> OPEN
                       |--and a large one has begun, without room---> NO_ROOM --room--> OPEN
                       |--the turn is over--------------------------> QUEUED ---turn--> SERVING
                       +--and the peer reads no replies-------------> HELD_UP --they are read--> QUEUED

Bytes that come while others are served first lead from OPEN to QUEUED. Every state leads to ENDING, which none leaves.
"""

from __future__ import annotations

import enum


class Input(enum.Enum):
    """What becomes of what the peer sends."""

    OPEN = "open"  # every whole frame is served
    SERVING = "serving"  # the session has its turn
    QUEUED = "queued"  # frames, or a request that has begun, wait for the session's turn
    HELD_UP = "held up"  # frames wait until the peer reads its replies; nothing has begun
    NO_ROOM = "no room"  # the rest of a large frame waits for memory that the user's other frames take
    ENDING = "ending"  # the session ends: nothing is served any more


class Output(enum.Enum):
    """How the peer reads what it is sent."""

    FLOWING = "flowing"
    CONGESTED = "congested"  # too slowly to have more requests served


class Intake(enum.Enum):
    """What a connection does about the rest of what its peer sends."""

    READ = "read"  # reads it; a frame that has begun, and the hello, must come in time
    REST = "rest"  # leaves it in the socket; no frame is late meanwhile
    PRESS = "press"  # leaves it there, too; but a large frame, for whose room others may wait, must come in time
    STAY = "stay"  # goes on as before
    STOP = "stop"  # leaves it there for good


INTAKES: dict[Input, dict[Output, Intake]] = {
    Input.OPEN: {Output.FLOWING: Intake.READ, Output.CONGESTED: Intake.PRESS},
    Input.SERVING: {Output.FLOWING: Intake.STAY, Output.CONGESTED: Intake.STAY},
    Input.QUEUED: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.HELD_UP: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.NO_ROOM: {Output.FLOWING: Intake.REST, Output.CONGESTED: Intake.PRESS},
    Input.ENDING: {Output.FLOWING: Intake.STOP, Output.CONGESTED: Intake.STOP},
}
"""The socket is read in one case only: everything that has come is served, and the peer reads its replies."""
