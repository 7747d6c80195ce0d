"""docs/benchmarks/peers.md: how the systems were set up, in words, and all figures from what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvoffloadd.units import format_bytes
from scripts.peers.figures import Figure, ahead
from scripts.peers.report import had

OWN = "kvoffloadd"

_INTRODUCTION = """\
Written by `make bench-peers`, which anybody can run: it makes an environment for each system from lock files, and has
each do the same work. The systems take turns: each round runs all of them, one at a time and another one first, and
starts each anew. No figure on this page comes from elsewhere. On a machine that others share, trust ratios."""

_SETUP = """\
What holds for all of them:

- The engine's side is a process of its own, with a KV cache in memory, no model and no GPU. Times are taken there,
  around the system's calls; making and comparing bytes is outside of them. Every byte that a load delivers is
  compared.
- Every prompt is new. Lookups hold what they find where the system can: kvoffloadd's `pin`, LMCache's read locks,
  Mooncake's leases.
- Disk is O_DIRECT: each of them was told so, or does it by itself. What the kernel's page cache had of the files was
  looked at after writing and after reading, and dropped in between; a system that did not go past it is named below.
  Nobody was asked to sync; kvoffloadd syncs each segment when it is full.
- Checksums are as each has them by default; what they catch is below.

And for each:

- **kvoffloadd**: defaults, but for sizes and threads. Each payload is hashed while it is stored, and again while it
  is loaded (`memory.verify_loads`; on GPUs it is an option, and off). What comes from disk is verified before it is
  served. Without a disk, its memory is a file in /dev/shm; its systemd unit keeps memory over a restart, too.
- **LMCache**: `lmcache server` and its own client classes, ZMQ on the loopback interface, memory allocated at the
  start, metrics and events off. *Engine copies* is `engine_driven` through the server's shared memory, its own
  choice on a CPU; *server copies* is `lmcache_driven`, as with GPUs. **On a CPU both copy with portable torch code:
  its CUDA kernels have no part in these figures.** It is given tokens and hashes them in every lookup and store,
  which lets engines of any kind share; the others are given names that an engine's prefix cache has made already.
  Its disk is `fs_native` with `use_odirect`. Checksums: none that it can be told to make.
- **vLLM tiering**: `TieringOffloadingSpec` and its `fs` tier, driven without a model or a scheduler. It is in the
  engine's process: there is no round trip, a lookup asks a table beside it, and a restart is a new manager over the
  same files, without the engine's own start. Its copies between engine and memory are CUDA's, for which torch
  stands in here: **its store and load say nothing about vLLM**, and its figures with a disk have the stand-in in
  them. Checksums: none that it can be told to make.
- **Mooncake Store**: a master, one `mooncake_client` that lends memory and disk, and the engine as a client that
  shares memory with it, all on one host. **What it is made for, RDMA between hosts, is not in these figures.** Its
  disk uses io_uring, with which it reads past the page cache; prompts are read in calls of four chunks, because its
  queue does not take the buffers of a whole prompt. It looks once a heartbeat for what is to go there,
  and a heartbeat is a second at least. A store that starts again waits until the master has forgotten it
  (`client_ttl`, set to 3 s), since one that is back sooner finds nothing of its disk again; the wait is in its
  figures. *From disk* is after such a restart. Checksums: `MOONCAKE_STORE_CHECKSUM`, off by default."""


def page(result: Mapping[str, Any]) -> str:
    """Markdown. `result`: as `result_of` makes it."""
    systems = result["systems"].values()
    named = ((one["title"], ", ".join(map(" ".join, one["versions"].items())) or "-") for one in systems)
    parts = (
        f"# kvoffloadd beside its peers, {result['machine']['date']}",
        _INTRODUCTION,
        f"    make bench-peers\n\nmakes the environments and runs\n\n    {result['command']}",
        "## Machine and versions",
        _table(("", ""), result["machine"].items()),
        _table(("system", "versions"), named),
        "## The work",
        _work(result["work"]),
        _SETUP,
        "## Figures",
        f"Medians of {result['rounds']} rounds, the least and the most in brackets. `-`: not compared, see below.",
        _figures(result),
        "### Where another is better",
        _ahead(result),
        "### What is not compared, and what went wrong",
        _by_case(result, "notes"),
        "## What each does",
        _by_case(result, "facts"),
    )
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(str(cell).replace('|', '/') for cell in line)} |" for line in lines)


def _work(work: Mapping[str, Any]) -> str:
    return f"""\
- Prompts of {work["prompt_tokens"]:,} tokens, {format_bytes(work["prompt_bytes"])} each, in chunks of
  {work["chunk_tokens"]} tokens, {format_bytes(work["chunk_bytes"])}. It is Llama-3.2-1B's KV cache in bf16:
  {work["layers"]} layers, in each {format_bytes(work["row_bytes"])} for a block of 16 tokens; blocks at random.
- A round stores and loads {work["prompts"]} prompts (medians), and writes as many to disk and reads them (the sum).
  Before that, and before reading, each system rests for {work["rest_s"]:g} s from its start. Some provide their memory
  then, kvoffloadd among them; others did so before they could be asked.
- Lookups: {work["lookup_token_bytes"]} bytes a token, so that 128k tokens fit into any memory; of {work["asks"]} the
  median.
- {work["threads"]} threads, wherever a system can be told how many."""


def _cell(figure: Figure, system: Mapping[str, Any]) -> str:
    spread = system["figures"].get(figure.name)
    if spread is None:
        return "-"
    median, least, most = (figure.shown(spread[name]) for name in ("median", "least", "most"))
    return f"{median} ({least} to {most})"


def _figures(result: Mapping[str, Any]) -> str:
    systems = result["systems"].values()
    return _table(
        ("", "unit", *(system["title"] for system in systems)),
        ((one.title, one.unit, *(_cell(one, system) for system in systems)) for one in had(result)),
    )


def _ahead(result: Mapping[str, Any]) -> str:
    systems = result["systems"]
    if OWN not in systems:
        return "kvoffloadd was not among those that ran."
    found = ahead(OWN, {name: system["figures"] for name, system in systems.items()})
    lines = [f"- {figure.title}: {systems[who]['title']}, {factor:.2f} times" for figure, who, factor in found]
    return "The best of the others, by medians:\n\n" + "\n".join(lines) if lines else "By medians, nowhere in this run."


def _by_case(result: Mapping[str, Any], what: str) -> str:
    systems = result["systems"].values()
    cases = dict.fromkeys(case for system in systems for case in system[what])
    rows = [(case, system["title"], system[what][case]) for case in cases for system in systems if case in system[what]]
    return _table(("case", "system", "what happened"), rows) if rows else "Nothing."
