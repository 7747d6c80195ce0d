"""Smoke test: does a vLLM engine with your model get its KV cache back from a running daemon, and answer the same?

Starts the engine with the connector and asks it the same random prompts three times: computed, from the engine's own
prefix cache, and, that cache emptied, from the daemon. Prints how many tokens came from the daemon and how many answers
are those of one of the first two rounds. (Kernels may round otherwise when less is computed, so an answer can change
without the daemon, too: then the first two rounds differ, and that is counted.) With --keep NAME the prompts are asked
under that name as well, and first of all: a later run with the same name shows what outlived engine and daemon.

Run it with the Python that has vLLM and kvoffloadd. Exit status 0 only if tokens came from the daemon and all answers
are known; 1 otherwise; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import random
import secrets
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from kvoffloadd.client import Client
from kvoffloadd.errors import ClientError
from kvoffloadd.testing.output import print_json, print_table
from kvoffloadd.testing.program import EXIT_BAD, EXIT_USAGE
from scripts.vllm import transfer_config

HITS = "vllm:external_prefix_cache_hits"

_FIRST_TOKEN = 3  # the ones before it are special in most vocabularies
_RESET_S = 30.0

LookupCache = list[list[int]]


class SmokeReport(NamedTuple):
    """What was seen. `from_earlier`: tokens that the daemon had under the name of --keep; None without a name."""

    prompts: int
    prompt_tokens: int
    from_earlier: int | None
    from_daemon: int
    equal: int
    unstable: int
    start_s: float
    computed_s: float
    from_daemon_s: float

    @property
    def is_good(self) -> bool:
        return self.from_daemon > 0 and self.equal == self.prompts


def main() -> int:
    given = _arguments()
    if importlib.util.find_spec("vllm") is None:
        print("vllm_smoke: no vLLM here: run this with the Python that has it", file=sys.stderr)
        return EXIT_USAGE
    try:
        with Client(given.socket, namespace=None, role="observer", connect_deadline_s=0.0) as observer:
            observer.ping()
    except ClientError as error:
        print(f"vllm_smoke: no daemon: {error}", file=sys.stderr)
        return EXIT_BAD
    if not given.verbose:  # before vLLM is imported, which reads it then, as do its processes
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")
        warnings.simplefilter("ignore")
    report = run(importlib.import_module("vllm"), given)
    if given.json:
        print_json({**report._asdict(), "good": report.is_good})
    else:
        _print(report)
    return 0 if report.is_good else EXIT_BAD


class SmokeEngine:
    """The engine, and what it was asked."""

    def __init__(self, vllm: Any, given: argparse.Namespace) -> None:
        self._vllm = vllm
        extra = {"socket": given.socket} | ({"block_size": given.chunk} if given.chunk else {})
        self._engine = vllm.LLM(
            model=given.model,
            enable_prefix_caching=True,
            disable_log_stats=False,
            use_tqdm_on_load=False,
            kv_transfer_config=vllm.config.KVTransferConfig(**transfer_config(given.route, **extra)),
            **given.engine,
        )
        self._answer_tokens = given.answer
        self.vocabulary = self._engine.llm_engine.model_config.get_vocab_size()

    def ask(self, prompts: Sequence[list[int]], salt: str) -> LookupCache:
        """All at once. Prompts of another `salt` are other prompts for every cache."""
        requests = [{"prompt_token_ids": prompt, "cache_salt": salt} for prompt in prompts]
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=self._answer_tokens, ignore_eos=True, detokenize=False
        )
        return [list(done.outputs[0].token_ids) for done in self._engine.generate(requests, params, use_tqdm=False)]

    def forget(self, prompt: list[int]) -> None:
        """Empty the engine's own cache, when all is on its way to the daemon: it is sent with the next step."""
        until = time.monotonic() + _RESET_S
        self.ask([prompt], secrets.token_hex(8))
        while not self._engine.reset_prefix_cache():
            if time.monotonic() > until:
                raise SystemExit("vllm_smoke: the engine does not give its prefix cache up")
            self.ask([prompt], secrets.token_hex(8))

    def hits(self) -> int:
        """Prompt tokens that came from the daemon so far."""
        return int(sum(metric.value for metric in self._engine.get_metrics() if metric.name == HITS))


def run(vllm: Any, given: argparse.Namespace) -> SmokeReport:
    """Start the engine and ask it."""
    _say("starting the engine")
    begun = time.monotonic()
    engine = SmokeEngine(vllm, given)
    start_s = time.monotonic() - begun
    rng = random.Random(given.seed)
    prompts = [
        [rng.randrange(_FIRST_TOKEN, engine.vocabulary) for _ in range(given.tokens)] for _ in range(given.prompts)
    ]
    kept: LookupCache | None = None
    if given.keep:
        _say(f"asking what the daemon has under the name {given.keep}")
        kept = engine.ask(prompts, given.keep)
        engine.forget(prompts[0][:2])
    earlier = engine.hits()

    salt = secrets.token_hex(8)  # so that the first round is computed whatever the daemon has
    _say("computing")
    begun = time.monotonic()
    computed = engine.ask(prompts, salt)
    computed_s = time.monotonic() - begun
    own = engine.ask(prompts, salt)
    engine.forget(prompts[0][:2])
    before = engine.hits()
    _say("asking again")
    begun = time.monotonic()
    loaded = engine.ask(prompts, salt)
    from_daemon_s = time.monotonic() - begun
    known = [{tuple(one), tuple(other)} for one, other in zip(computed, own, strict=True)]
    rounds = [loaded] if kept is None else [loaded, kept]
    return SmokeReport(
        prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        from_earlier=None if kept is None else earlier,
        from_daemon=engine.hits() - before,
        equal=sum(all(tuple(one[number]) in known[number] for one in rounds) for number in range(len(prompts))),
        unstable=sum(one != other for one, other in zip(computed, own, strict=True)),
        start_s=start_s,
        computed_s=computed_s,
        from_daemon_s=from_daemon_s,
    )


def _say(what: str) -> None:
    print(f"vllm_smoke: {what}", file=sys.stderr, flush=True)


def _print(report: SmokeReport) -> None:
    share = 100 * report.from_daemon / report.prompt_tokens
    rows = [
        ("prompts", f"{report.prompts:,}", f"{report.prompt_tokens:,} tokens"),
        ("tokens from the daemon", f"{report.from_daemon:,}", f"{share:.1f} %"),
        ("answers as computed", f"{report.equal:,}", f"of {report.prompts:,}"),
    ]
    if report.unstable:
        rows.append(("answers that changed", f"{report.unstable:,}", "with the engine's own cache alone"))
    if report.from_earlier is not None:
        rows.append(("tokens from an earlier run", f"{report.from_earlier:,}", "under the name of --keep"))
    times = [
        ("engine's start", f"{report.start_s:,.1f} s", ""),
        ("computed", f"{report.computed_s:,.2f} s", "all prompts at once"),
        ("from the daemon", f"{report.from_daemon_s:,.2f} s", ""),
    ]
    print_table(
        "vLLM with kvoffloadd: " + ("good" if report.is_good else "NOT GOOD"), [rows, times], good=report.is_good
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", required=True, help="as for vLLM: a folder, or a name of the Hub")
    add("--socket", help="of the daemon (default: the first that answers, as the engine finds it)")
    add("--route", choices=("connector", "spec"), default="connector", help="docs/VLLM.md (default: %(default)s)")
    add("--chunk", type=int, metavar="TOKENS", help="tokens of a key (default: a block of the engine)")
    add("--prompts", type=int, default=8, help="how many (default: %(default)s)")
    add("--tokens", type=int, default=500, help="of each prompt (default: %(default)s)")
    add("--answer", type=int, default=16, metavar="TOKENS", help="of each answer (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the prompts (default: %(default)s)")
    add("--keep", metavar="NAME", help="ask under this name, too; again in a later run, to see what has been kept")
    add("--engine", type=_options, default={}, metavar="JSON", help='more of the engine: {"max_model_len": 4096}')
    add("--verbose", action="store_true", help="with all that vLLM has to say")
    add("--json", action="store_true", help="one JSON object on standard output in place of the table")
    given = parser.parse_args()
    if given.prompts < 1 or given.tokens < 2 or given.answer < 1:
        parser.error("--prompts and --answer: at least 1; --tokens: at least 2")
    return given


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return options
