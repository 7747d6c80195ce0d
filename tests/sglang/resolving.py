"""What SGLang makes of arguments before it loads anything: a child that prints an identity for each of some sets."""

from __future__ import annotations

import json
import sys
from typing import Any

from kvoffloadd.integrations.common.contents import Fingerprint
from kvoffloadd.integrations.common.naming import digest_of
from kvoffloadd.integrations.sglang.files import look_at
from kvoffloadd.integrations.sglang.identity import identity_of


def resolved(options: dict[str, Any]) -> dict[str, Any]:
    """All arguments, as an engine of SGLang would have them."""
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**options)
    arguments.resolve_once()
    found: dict[str, Any] = arguments.resolved_dict()
    return found


def main() -> None:
    """Option sets come as JSON on standard input; the answer is the last line of standard output."""
    sets = json.load(sys.stdin)
    found = [digest_of(identity_of(resolved(one), lambda source: look_at(source, Fingerprint.AUTO))) for one in sets]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
