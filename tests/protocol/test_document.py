"""docs/PROTOCOL.md describes what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from kvoffloadd.client import digest_layers
from kvoffloadd.protocol.connection import Connection
from kvoffloadd.protocol.messages import Hello

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "PROTOCOL.md").read_text()


def test_generated_sections_are_those_of_the_code() -> None:
    script = "import sys; from scripts import protocol_tables as t; sys.stdout.write(t.fill(t.DOCUMENT.read_text()))"
    made = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert made.stdout == DOCUMENT, "python -m scripts protocol_tables --write"


def test_the_example_of_a_digest_is_right() -> None:
    example = re.search(r"the layers `(\w+)` and `(\w+)` have the digest\n? *`([0-9a-f ]+)`", DOCUMENT)
    assert example is not None
    assert digest_layers(example.groups()[:2]) == bytes.fromhex(example[3])


def test_the_example_is_a_frame() -> None:
    """What a reader would type in from the document is understood."""
    block = DOCUMENT.split("## Example")[1].split("```")[1]
    text = " ".join(found[0] for line in block.splitlines() if (found := re.match(r"(?:[0-9a-f.]{2,3} ?| )+", line)))
    before, after = text.split("...")
    frame = bytes.fromhex(before) + bytes.fromhex(after)
    missing = 4 + int.from_bytes(frame[:4], "little") - len(frame)
    frame = bytes.fromhex(before) + bytes(missing) + bytes.fromhex(after)
    connection = Connection(daemon=True)
    connection.receive_data(frame)
    got = connection.next_message()
    assert got is not None
    assert got[0] == Hello(seq=1, version=1, role="observer", instance=bytes(16))
