"""What the demo found: figures, verdict, table and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffloadd.units import format_bytes
from scripts.demo.worker import KV_HEADS, WINDOW_TOKENS, Answer, Speed
from scripts.harness.output import format_ms, print_table, ratio
from scripts.harness.watch import DaemonCounters

if TYPE_CHECKING:
    from scripts.demo.chat import Turn
    from scripts.harness.counters import Counters

SHOWN = 20
Rows = list[tuple[str, str, str]]


@dataclass(slots=True)
class Report:
    """All figures of one demo.

    `chat_bytes`: the KV cache of all conversations. `known_tokens`: of prompts, what earlier turns had; no cache can
    restore more. `restored_after`: all that was restored after the daemon's restart, in `restore_s`.
    """

    seed: int
    memory_bytes: int
    kv_heads: int
    counters: Counters
    seconds: float = 0.0
    turns: int = 0
    conversations: set[int] = field(default_factory=set)
    chat_bytes: int = 0
    prompt_tokens: int = 0
    known_tokens: int = 0
    restored_tokens: int = 0
    references: int = 0
    hits: int = 0
    from_disk: int = 0
    kills: int = 0
    unmap_s: float | None = None
    latency_s: dict[str, float | None] = field(default_factory=dict)
    stored_bytes: int = 0
    loaded_bytes: int = 0
    speed: Speed = field(default_factory=lambda: Speed(0.0, 0.0, 0.0))
    disk_bytes: int = 0
    disk_most_bytes: int = 0
    demoted_keys: int = 0
    corrupt: int = 0
    restart_s: float = 0.0
    keys_found: int = 0
    restored_after: Answer = field(default_factory=lambda: Answer(0, 0, 0, 0, 0))
    disk_read_bytes: int = 0
    restore_s: float = 0.0
    daemon: DaemonCounters = field(default_factory=DaemonCounters)
    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def count(self, turn: Turn, answer: Answer) -> None:
        """A turn was answered."""
        self.turns += 1
        self.conversations.add(turn.conversation)
        self.prompt_tokens += turn.prompt_tokens
        self.known_tokens += turn.known_tokens
        self.restored_tokens += answer.restored_tokens
        self.references += answer.references
        self.hits += answer.hits
        self.from_disk += answer.from_disk

    def count_restored(self, answer: Answer) -> None:
        """A turn was restored after the daemon's restart."""
        before, more = asdict(self.restored_after), asdict(answer)
        self.restored_after = Answer(**{name: before[name] + more[name] for name in before})

    def note_disk(self, disk: dict[str, Any], used: int) -> None:
        """Before and after the restart: counters of a run of the daemon, bytes on disk."""
        self.disk_most_bytes = max(self.disk_most_bytes, used)
        self.demoted_keys += disk["demoted"]["keys"]
        self.corrupt += disk["corrupt"]
        if used > self.disk_bytes:
            self.errors.append(f"{used} bytes on disk, which may have {self.disk_bytes}")

    def note_chat(self) -> None:
        """Keep what the workers counted during the chat, before they do anything else."""
        self.stored_bytes, self.loaded_bytes = self.counters.total("stored_bytes"), self.counters.total("loaded_bytes")
        for what in ("store", "load"):
            for percent in (50, 99):
                self.latency_s[f"{what}_p{percent}"] = self.counters.percentile_s(what, percent)

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something was checked."""
        total = self.counters.total
        bad = total("wrong_bytes") + total("broken_promises")
        found = self.findings or self.leaks or self.errors
        checked = total("verified_loads") > 0 and self.restored_after.from_disk > 0
        return bad == 0 and not found and not self.corrupt and checked

    @property
    def disk_gb_s(self) -> float:
        """What came from disk after the restart, while both workers restored their turns and compared the bytes."""
        return ratio(self.disk_read_bytes / 1e9, self.restore_s)

    def figures(self) -> str:
        """For the progress bar."""
        hit_rate = 100 * ratio(self.restored_tokens, self.prompt_tokens)
        return f"{self.restored_tokens:,} tokens restored, {hit_rate:.0f} %, {self.counters.total('wrong_bytes')} wrong"

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        total, speed = self.counters.total, self.speed
        to_limit = {"store": ratio(speed.store, speed.memcpy), "load": ratio(speed.load, speed.memcpy)}
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "memory_bytes": self.memory_bytes,
            "kv_heads": self.kv_heads,
            "chat_bytes": self.chat_bytes,
            "turns": self.turns,
            "conversations": len(self.conversations),
            "prompt_tokens": self.prompt_tokens,
            "known_tokens": self.known_tokens,
            "restored_tokens": self.restored_tokens,
            "hit_rate": round(ratio(self.restored_tokens, self.prompt_tokens), 4),
            "block_references": self.references,
            "block_hits": self.hits,
            "from_disk_keys": self.from_disk,
            "stores": total("stores"),
            "loads": total("loads"),
            "verified_loads": total("verified_loads"),
            "stored_bytes": self.stored_bytes,
            "loaded_bytes": self.loaded_bytes,
            "wrong_bytes": total("wrong_bytes"),
            "stray_bytes": total("stray_bytes"),
            "broken_promises": total("broken_promises"),
            "evictions": self.daemon.keys_evicted,
            **{f"{name}_ms": None if s is None else round(s * 1e3, 4) for name, s in self.latency_s.items()},
            "memcpy_gb_s": round(speed.memcpy, 3),
            "store_gb_s": round(speed.store, 3),
            "load_gb_s": round(speed.load, 3),
            "store_ratio_to_limit": round(to_limit["store"], 4),
            "load_ratio_to_limit": round(to_limit["load"], 4),
            "ratio_to_limit": round(min(to_limit.values()), 4),
            "kills": self.kills,
            "unmap_ms": None if self.unmap_s is None else round(self.unmap_s * 1e3, 2),
            "disk_bytes": self.disk_bytes,
            "disk_most_bytes": self.disk_most_bytes,
            "demoted_keys": self.demoted_keys,
            "corrupt": self.corrupt,
            "daemon_kills": 1,
            "restart_ms": round(self.restart_s * 1e3, 1),
            "keys_found_on_disk": self.keys_found,
            "after_restart_restored_tokens": self.restored_after.restored_tokens,
            "after_restart_hit_keys": self.restored_after.hits,
            "after_restart_from_disk_keys": self.restored_after.from_disk,
            "after_restart_bytes": self.restored_after.loaded_bytes,
            "after_restart_disk_bytes": self.disk_read_bytes,
            "after_restart_gb_s": round(self.disk_gb_s, 3),
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "verify_findings": len(self.findings),
            "findings": self.findings[:SHOWN],
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "good": self.is_good,
        }


def print_report(report: Report) -> None:
    """The table, and below it each thing that is wrong."""
    title = f"kvoffloadd demo: gpt-oss-20b, {report.kv_heads} of {KV_HEADS} KV heads, sliding window {WINDOW_TOKENS}"
    print_table(title, [_chat(report), _copies(report), _disk(report), _verdict(report)], good=report.is_good)
    findings = [f"finding: {finding}" for finding in report.findings]
    leaked = [f"leaked: {leak}" for leak in report.leaks]
    for text in [*findings[:SHOWN], *leaked, *report.errors[:SHOWN], *report.said[:SHOWN]]:
        print(text)


def _chat(report: Report) -> Rows:
    hit_rate, most = (100 * ratio(x, report.prompt_tokens) for x in (report.restored_tokens, report.known_tokens))
    return [
        ("chat turns", f"{report.turns:,}", f"of {len(report.conversations)} conversations, on 2 workers in turn"),
        ("prompts", f"{report.prompt_tokens:,}", "tokens"),
        ("not recomputed", f"{report.restored_tokens:,}", "tokens, restored from the daemon"),
        ("hit rate", f"{hit_rate:.1f} %", f"of prompt tokens; {most:.1f} % were known"),
        ("memory tier", format_bytes(report.memory_bytes), f"for a chat of {format_bytes(report.chat_bytes)}"),
        ("evicted", f"{report.daemon.keys_evicted:,}", "keys"),
    ]


def _copies(report: Report) -> Rows:
    speed, rows = report.speed, []
    for what, done, size, rate in (
        ("store", "stored", report.stored_bytes, speed.store),
        ("load", "restored", report.loaded_bytes, speed.load),
    ):
        middle, slow = (format_ms(report.latency_s[f"{what}_p{percent}"]) for percent in (50, 99))
        rows.append((done, format_bytes(size), f"latency p50 {middle}, p99 {slow}"))
        rows.append((f"{what} speed", f"{rate:.2f} GB/s", f"{100 * ratio(rate, speed.memcpy):.0f} % of memcpy"))
    return [*rows, ("memcpy", f"{speed.memcpy:.2f} GB/s", "one thread, as many bytes, in the same run")]


def _disk(report: Report) -> Rows:
    after = report.restored_after
    size, most, read = map(format_bytes, (report.disk_bytes, report.disk_most_bytes, report.disk_read_bytes))
    return [
        ("disk tier", size, f"{most} in use, {report.demoted_keys:,} keys written"),
        ("daemon killed -9", format_ms(report.restart_s), f"until it answered again; {report.keys_found:,} keys found"),
        ("served from disk", f"{after.from_disk:,}", f"keys of {after.hits:,}; {report.from_disk:,} during the chat"),
        ("disk speed", f"{report.disk_gb_s:.2f} GB/s", f"{read} verified; {format_bytes(after.loaded_bytes)} loaded"),
    ]


def _verdict(report: Report) -> Rows:
    total = report.counters.total
    loads = f"{total('verified_loads'):,} of {total('loads'):,}"
    return [
        ("worker killed -9", format_ms(report.unmap_s), "until its memory was unmapped"),
        ("verified loads", loads, "every byte compared"),
        ("self-audit", f"{len(report.findings)} findings", f"{len(report.leaks)} leaks, {len(report.errors)} errors"),
        ("wrong bytes", f"{total('wrong_bytes'):,}", "the point of it all"),
    ]
