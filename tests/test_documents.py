"""The documents: links and anchors lead somewhere, files and targets that they name exist, commands can be parsed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvoffloadd.cli.arguments import COMMANDS, make_parser
from scripts.__main__ import MODULES

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "config").rglob("*.md"))
)  # fmt: skip
each_document = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
NARROW = (
    "CONTRIBUTING.md",
    "README.md",
    "docs/ARCHITECTURE.md",
    "docs/BEHAVIOR.md",
    "docs/COMPARISON.md",
    "docs/DEPENDENCIES.md",
    "docs/LAYOUTS.md",
    "docs/OPERATIONS.md",
    "docs/PLANNING.md",
    "docs/SGLANG.md",
    "docs/STATUS.md",
    "docs/VLLM.md",
)
"""Documents whose lines, tables aside, keep to the width of the source."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    """Fenced and indented code, and code within lines, left out."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "``", text)


def anchors(path: Path) -> set[str]:
    """Returns the anchors that sites that show Markdown make of headings; a second one of the same
    name gets a number.
    """
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *$", re.sub(r"^```.*?^```", "", text_of(path), flags=re.S | re.M), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(f"{name}-{count}" if count else name)
    return names


def links(path: Path) -> Iterator[tuple[str, str]]:
    """Target and anchor of each link to a file, or within this one."""
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(path))):
        if not re.match(r"[a-z]+:", target):
            file, _, anchor = target.partition("#")
            yield file, anchor


@each_document
def test_links_lead_somewhere(path: Path) -> None:
    wrong = []
    for file, anchor in links(path):
        target = (path.parent / file).resolve() if file else path
        if not target.exists():
            wrong.append(file)
        elif anchor and anchor not in anchors(target):
            wrong.append(f"{file}#{anchor}")
    assert wrong == []


def test_there_are_links_and_anchors() -> None:
    """What finds none is no test."""
    assert sum(1 for path in DOCUMENTS for _ in links(path)) > 40
    assert "quick-start" in anchors(ROOT / "README.md")


NAMED = re.compile(r"(?<![\w/.])((?:docs|config|scripts|tests|kvoffloadd)/[\w./@-]*\w)")


@each_document
def test_files_that_are_named_exist(path: Path) -> None:
    if path.name == "CHANGELOG.md":
        return  # it is history
    named = {name for code in re.findall(r"`([^`\n]+)`", text_of(path)) for name in NAMED.findall(code)}
    ours = {name for name in named if (ROOT / name.split("/")[0]).is_dir() and not name.startswith("docs/benchmarks/")}
    missing = sorted(
        name
        for name in ours
        if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists() and not list(ROOT.glob(f"{name}*"))
    )
    # In the package the rooms are named without it; `kvoffloadd/...` may also be a place on a host.
    assert [name for name in missing if not name.startswith("kvoffloadd/")] == []


def code_lines(path: Path) -> Iterator[str]:
    """Yields the lines of fenced and indented blocks, with continued lines joined, and without comments."""
    text = text_of(path)
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"(?:^ {4,}\S.*\n?)+", text, flags=re.MULTILINE)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            yield line.strip()


def kvoffloadd_commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        for line in code_lines(path):
            match = re.match(r"(?:[\w./-]+=\S+ )*(?:\S*/)?kvoffloadd ((?:[a-z]+|--).*)$", line)
            if match:
                found.append((str(path.relative_to(ROOT)), match[1]))
    return found


@pytest.mark.parametrize(("document", "command"), kvoffloadd_commands())
def test_commands_can_be_parsed(document: str, command: str) -> None:
    words = shlex.split(command, comments=True)
    words = words[: next((at for at, word in enumerate(words) if word in ("|", "&", "&&", ">", ";")), len(words))]
    if "..." in words or "--help" in words or words in (["--version"], []):
        return
    make_parser().parse_args(words)


def test_commands_are_found() -> None:
    assert len(kvoffloadd_commands()) > 15
    named = {command.split()[0] for _, command in kvoffloadd_commands()}
    everything = {name for names in COMMANDS.values() for name in names}
    assert everything - named <= {"clear"}, "each command is shown somewhere"


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md":
            named = set(re.findall(r"`make ([a-z-]+)", text_of(path)))
            named |= {line.split()[1] for line in code_lines(path) if re.match(r"make [a-z]", line)}
            assert named <= targets, f"{path}: {named - targets}"


def script_commands() -> list[tuple[str, str, str]]:
    """Returns document, script, and the rest of the line, which includes options that a comment names."""
    return [
        (str(path.relative_to(ROOT)), match[1], match[2])
        for path in DOCUMENTS
        for line in code_lines(path)
        if (match := re.search(r"python3? -m scripts (\w+)(.*)$", line))
    ]


@pytest.mark.parametrize(("document", "script", "rest"), script_commands())
def test_options_of_scripts_exist(document: str, script: str, rest: str) -> None:
    module = ROOT / "scripts" / f"{MODULES[script].replace('.', '/')}.py"
    sources = (module, ROOT / "scripts" / "harness" / "program.py")
    known = set(re.findall(r'"(--[a-z-]+)"', "".join(map(text_of, sources))))
    assert set(re.findall(r"(--[a-z][a-z-]*)", rest)) <= known


def test_commands_of_scripts_are_found() -> None:
    assert len(script_commands()) > 15


def test_variables_of_make_exist() -> None:
    known = set(re.findall(r"^([A-Z_]+) [?:]?=", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        if path.name != "CHANGELOG.md":
            commands = [line for line in code_lines(path) if line.startswith("make ")]
            commands += re.findall(r"`(make [a-z-]+ [^`]*)`", text_of(path))
            named = {name for command in commands for name in re.findall(r" ([A-Z_]+)=", command.split("#")[0])}
            assert named <= known | {"DESTDIR"}, f"{path}: {named - known}"


@pytest.mark.parametrize("name", NARROW)
def test_lines_are_narrow(name: str) -> None:
    """This holds for what is read in the source, too. A row of a table is one line, whatever is in it."""
    lines = text_of(ROOT / name).splitlines()
    assert [line for line in lines if len(line) > 120 and not line.startswith("|")] == []
