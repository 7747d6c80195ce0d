"""SGLang's own lists against those of the adapter: server arguments, and what changes weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvoffloadd.integrations.sglang import environment
from kvoffloadd.integrations.sglang.arguments import COUNTED, HARMLESS, NAMES_HARMLESS, HarmlessArguments
from kvoffloadd.testing.process import ROOT
from tests.sglang.engine import ENVIRONMENT

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

HOLDERS = ("arg_groups/", "server_args.py", "runtime_context.py")
"""Modules that make all arguments, and hold them."""
WORDS = {"chat_template", "host", "log_level", "port", "revision", "sidecar", "warmups"}
"""Arguments whose names other things have, too: they are looked for where arguments are read."""


@cache
def modules() -> Mapping[str, str]:
    """SGLang's sources, by their paths below sglang/srt."""
    spec = find_spec("sglang")
    assert spec
    assert spec.origin
    root = Path(spec.origin).parent / "srt"
    paths = {str(path.relative_to(root)): path for path in root.rglob("*.py")}
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if not name.startswith(HOLDERS)}


def declared() -> set[str]:
    """Fields of ServerArgs."""
    from msgspec.structs import fields
    from sglang.srt.server_args import ServerArgs

    return {field.name for field in fields(ServerArgs)}


def test_harmless_variables_are_sglangs() -> None:
    """Two are of its processes alone."""
    from sglang.srt.environ import Envs

    names = {f"SGLANG_{name}" for left in (*environment.HARMLESS, *environment.ELSEWHERE) for name in left.names}
    assert names - set(vars(Envs)) == {"SGLANG_RUN_ID", "SGLANG_DP_RANK"}


@cache
def readers() -> Mapping[str, set[str]]:
    """Modules that read each argument."""
    words = "|".join(WORDS)
    others = "|".join(NAMES_HARMLESS - WORDS)
    asked = rf"(?:get_[a-z]+\(\)(?:\.\w+)?|server_args|cfg|view)\.({words})\b"
    reads = re.compile(rf"{asked}|[.\"']({others})\b")
    found: dict[str, set[str]] = {name: set() for name in NAMES_HARMLESS}
    for module, text in modules().items():
        for one in reads.finditer(text):
            found[one[1] or one[2]].add(module)
    return found


def test_each_argument_is_judged() -> None:
    """One that is new in a release counts until it is listed as harmless, with a reason."""
    assert declared() - COUNTED - NAMES_HARMLESS == set(), "nobody has judged these"
    assert (COUNTED | NAMES_HARMLESS) - declared() == set(), "SGLang has these no more"


@pytest.mark.parametrize("group", [group for group in HARMLESS if group.read_in], ids=lambda group: group.reason[:30])
def test_harmless_ones_are_read_where_it_is_said(group: HarmlessArguments) -> None:
    elsewhere = {
        name: found
        for name in sorted(group.names)
        if (found := {module for module in readers()[name] if not module.startswith(group.read_in)})
    }
    assert elsewhere == {}
    unread = {start for start in group.read_in if not any(module.startswith(start) for module in modules())}
    assert unread == set(), "there are no such modules"


def test_drafts_are_read_by_drafts_alone() -> None:
    """A look at what the others say: of all that computes, only models of drafts ask for one."""
    asked = readers()["speculative_draft_model_path"]
    assert {module for module in asked if module.startswith(("models/", "layers/"))} == {"models/deepseek_nextn.py"}


_LEFT_ALONE = """
import importlib
importlib.import_module("sglang_on_cpu").install()
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from kvoffloadd.integrations.sglang.engine import watch_weights
before = dict(vars(WeightUpdater))
watch_weights()
print(*(name for name, value in before.items() if callable(value) and vars(WeightUpdater)[name] is value))
"""


def test_each_method_that_changes_weights_is_watched() -> None:
    """All are watched but those that only connect to others. This runs in a separate process, since it changes SGLang's
    class.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_ALONE], cwd=ROOT, env={**os.environ, **ENVIRONMENT},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    public = {name for name in done.stdout.split() if not name.startswith("_")}
    assert public == {"init_weights_update_group", "destroy_weights_update_group"}
