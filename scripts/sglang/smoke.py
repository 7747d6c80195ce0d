"""Smoke test: does an SGLang engine with your model get its pages back from a running daemon, and answer the same?

Starts the engine with our storage and asks it the same random prompts three times: computed, from the engine's own
cache, and, that emptied, from the daemon. Prints how many tokens came from the daemon and how many answers are those of
one of the first two rounds. (Kernels may round otherwise when less is computed, so an answer can change without the
daemon, too.) With the same --seed a second run finds what the first one has stored.

Run it with the Python that has SGLang and kvoffloadd. Exit status 0 only if tokens came from the daemon and all answers
are known; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import sys
import time
from typing import Any, NamedTuple

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.output import print_json, print_table
from kvoffloadd.testing.program import EXIT_BAD, EXIT_USAGE
from kvoffloadd.testing.wait import until
from scripts.sglang import storage_options

_FIRST_TOKEN = 3  # the ones before it are special in most vocabularies
_STORED_S = 120.0
_QUIET_S = 2.0


class HiCacheRound(NamedTuple):
    """What the prompts have brought. `stored`: tokens of them that came from the daemon."""

    answers: list[list[int]]
    stored: int


class HiCacheReport(NamedTuple):
    """What was seen. `from_earlier`: tokens that the daemon had before the first round."""

    prompts: int
    prompt_tokens: int
    from_earlier: int
    from_daemon: int
    equal: int

    @property
    def is_good(self) -> bool:
        return self.from_daemon > 0 and self.equal == self.prompts


def main() -> int:
    given = _arguments()
    if importlib.util.find_spec("sglang") is None:
        print("sglang_smoke: no SGLang here: run this with the Python that has it", file=sys.stderr)
        return EXIT_USAGE
    try:
        with Client(given.socket, namespace=None, role="observer", connect_deadline_s=0.0) as observer:
            report = run(importlib.import_module("sglang"), given, observer)
    except ClientError as error:
        print(f"sglang_smoke: no daemon: {error}", file=sys.stderr)
        return EXIT_BAD
    if given.json:
        print_json({**report._asdict(), "good": report.is_good})
    else:
        _print(report)
    return 0 if report.is_good else EXIT_BAD


def run(sglang: Any, given: argparse.Namespace, observer: Client) -> HiCacheReport:
    """Start the engine and ask it."""
    storage = storage_options(socket=given.socket, prefetch_threshold=1)
    options = {"page_size": 64, "log_level": "warning", **storage, **given.engine}
    with sglang.Engine(model_path=given.model, **options) as engine:
        rng = random.Random(given.seed)
        vocabulary = engine.tokenizer_manager.model_config.vocab_size
        prompts = [[rng.randrange(_FIRST_TOKEN, vocabulary) for _ in range(given.tokens)] for _ in range(given.prompts)]
        computed, own = _ask(engine, prompts, given.answer), _ask(engine, prompts, given.answer)
        _await_stores(observer)
        engine.flush_cache()
        loaded = _ask(engine, prompts, given.answer)
    known = zip(loaded.answers, computed.answers, own.answers, strict=True)
    return HiCacheReport(
        prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        from_earlier=computed.stored,
        from_daemon=loaded.stored,
        equal=sum(answer in answers for answer, *answers in known),
    )


def _ask(engine: Any, prompts: list[list[int]], tokens: int) -> HiCacheRound:
    """All at once."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=[sampling] * len(prompts))
    details = [one["meta_info"].get("cached_tokens_details") or {} for one in found]
    return HiCacheRound(
        [list(one["output_ids"]) for one in found], sum(detail.get("storage") or 0 for detail in details)
    )


def _await_stores(observer: Client) -> None:
    """SGLang stores a prompt's pages some time after its answer, and forgets what it has not when it is flushed."""
    seen: list[tuple[float, int]] = []

    def is_quiet() -> bool:
        status = observer.status()
        seen.append((time.monotonic(), status["cache"]["keys"]))
        since = min(at for at, keys in seen if keys == seen[-1][1])
        return status["running"]["jobs"] == 0 and seen[-1][0] - since > _QUIET_S

    until(is_quiet, "all is stored", _STORED_S)


def _print(report: HiCacheReport) -> None:
    share = 100 * report.from_daemon / report.prompt_tokens
    rows = [
        ("prompts", f"{report.prompts:,}", f"{report.prompt_tokens:,} tokens"),
        ("tokens from the daemon", f"{report.from_daemon:,}", f"{share:.1f} %"),
        ("answers as computed", f"{report.equal:,}", f"of {report.prompts:,}"),
        ("tokens from an earlier run", f"{report.from_earlier:,}", "in the first round"),
    ]
    print_table("SGLang with kvoffloadd: " + ("good" if report.is_good else "NOT GOOD"), [rows], good=report.is_good)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="as for SGLang: a folder, or a name of the Hub")
    add("--socket", help="of the daemon (default: the first that answers, as the engine finds it)")
    add("--prompts", type=int, default=8, help="how many (default: %(default)s)")
    add("--tokens", type=int, default=500, help="of each prompt (default: %(default)s)")
    add("--answer", type=int, default=16, metavar="TOKENS", help="of each answer (default: %(default)s)")
    add("--seed", type=int, default=None, help="of the prompts (default: others in each run)")
    add("--engine", type=json.loads, default={}, metavar="JSON", help='more of the engine: {"context_length": 4096}')
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if given.prompts < 1 or given.tokens < 2 or given.answer < 1:
        parser.error("--prompts and --answer: at least 1; --tokens: at least 2")
    return given
