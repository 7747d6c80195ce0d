"""docs/PLANNING.md shows what the command prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffloadd import cli
from tests.planner.models import example_of

DOCS = Path(__file__).parents[2] / "docs"
DOCUMENT = DOCS / "PLANNING.md"


@pytest.mark.parametrize(("document", "section"), [("PLANNING.md", "An example"), ("SGLANG.md", "How much fits")])
def test_the_example_is_real(
    document: str, section: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / document).read_text(encoding="utf-8")
    arguments, shown = example_of(text.split(f"## {section}\n")[1].split("\n## ")[0])
    monkeypatch.chdir(DOCS.parent)
    assert cli.main(arguments) == 0
    output = [line.rstrip() for line in capsys.readouterr().out.strip().splitlines()]
    assert shown == output


def test_every_option_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    known = capsys.readouterr().out
    words = DOCUMENT.read_text(encoding="utf-8").replace("`", " ").replace(",", " ").replace(")", " ").split()
    named = {word for word in words if word.startswith("--") and word != "--"}
    assert len(named) >= 10
    assert all(word in known for word in named - {"--help"})
