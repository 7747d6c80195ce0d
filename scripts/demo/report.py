"""What the demo found: figures, verdict, table and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvoffloadd.units import format_bytes
from scripts.demo.worker import WHOLE, Answer
from scripts.harness.models import named
from scripts.harness.output import SHOWN, format_ms, print_table, print_wrong, ratio

if TYPE_CHECKING:
    from scripts.demo.chat import Turn
    from scripts.harness.counters import Counters


@dataclass(slots=True)
class Report:
    """All figures of one demo.

    `chat_bytes`: the KV cache of all conversations. `known_tokens`: of prompts, what earlier turns had; no cache can
    restore more. `..._after`: what was restored after the daemon's restart.
    """

    seed: int
    memory_bytes: int
    model: str
    layout: str
    kv_heads: int
    chat_bytes: int
    disk_bytes: int
    counters: Counters
    seconds: float = 0.0
    turns: int = 0
    conversations: set[int] = field(default_factory=set)
    prompt_tokens: int = 0
    known_tokens: int = 0
    restored_tokens: int = 0
    from_disk: int = 0
    evictions: int = 0
    kills: int = 0
    unmap_s: float | None = None
    disk_most_bytes: int = 0
    demoted_keys: int = 0
    corrupt: int = 0
    restart_s: float = 0.0
    keys_found: int = 0
    restored_after: int = 0
    hits_after: int = 0
    from_disk_after: int = 0
    findings: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    @property
    def all_heads(self) -> int:
        """Of the whole model."""
        return named(self.model).kv_heads

    def count(self, turn: Turn, answer: Answer) -> None:
        """A turn was answered."""
        self.turns += 1
        self.conversations.add(turn.conversation)
        self.prompt_tokens += turn.prompt_tokens
        self.known_tokens += turn.known_tokens
        self.restored_tokens += answer.restored_tokens
        self.from_disk += answer.from_disk

    def note_disk(self, status: dict[str, Any], used: int) -> None:
        """At the end of a run of the daemon: its counters, bytes on disk."""
        self.disk_most_bytes = max(self.disk_most_bytes, used)
        self.demoted_keys += status["disk"]["demoted"]["keys"]
        self.corrupt += status["disk"]["corrupt"]
        if used > self.disk_bytes:
            self.errors.append(f"{used} bytes on disk, which may have {self.disk_bytes}")

    @property
    def is_good(self) -> bool:
        """Whether everything is right, and something was checked."""
        total = self.counters.total
        bad = total("wrong_bytes") + total("broken_promises") + self.corrupt
        found = self.findings or self.leaks or self.errors
        return not bad and not found and total("verified_loads") > 0 and self.from_disk_after > 0

    def figures(self) -> str:
        """For the progress bar."""
        hit_rate = 100 * ratio(self.restored_tokens, self.prompt_tokens)
        return f"{self.restored_tokens:,} tokens restored, {hit_rate:.0f} %, {self.counters.total('wrong_bytes')} wrong"

    def as_json(self) -> dict[str, object]:
        """Keys are stable."""
        counted = ("stores", "loads", "verified_loads", "wrong_bytes", "stray_bytes", "broken_promises")
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "memory_bytes": self.memory_bytes,
            "model": self.model,
            "layout": self.layout,
            "kv_heads": self.kv_heads,
            "chat_bytes": self.chat_bytes,
            "turns": self.turns,
            "conversations": len(self.conversations),
            "prompt_tokens": self.prompt_tokens,
            "known_tokens": self.known_tokens,
            "restored_tokens": self.restored_tokens,
            "hit_rate": round(ratio(self.restored_tokens, self.prompt_tokens), 4),
            "from_disk_keys": self.from_disk,
            **{name: self.counters.total(name) for name in counted},
            "evictions": self.evictions,
            "kills": self.kills,
            "unmap_ms": None if self.unmap_s is None else round(self.unmap_s * 1e3, 2),
            "disk_bytes": self.disk_bytes,
            "disk_most_bytes": self.disk_most_bytes,
            "demoted_keys": self.demoted_keys,
            "corrupt": self.corrupt,
            "daemon_kills": 1,
            "restart_ms": round(self.restart_s * 1e3, 1),
            "keys_found_on_disk": self.keys_found,
            "after_restart_restored_tokens": self.restored_after,
            "after_restart_hit_keys": self.hits_after,
            "after_restart_from_disk_keys": self.from_disk_after,
            "leaks": len(self.leaks),
            "leaked": self.leaks,
            "verify_findings": len(self.findings),
            "findings": self.findings[:SHOWN],
            "errors": self.errors[:SHOWN],
            "said": self.said[:SHOWN],
            "good": self.is_good,
        }

    def print(self) -> None:
        """The table, and below it each thing that is wrong."""
        total = self.counters.total
        hit_rate, most = (100 * ratio(x, self.prompt_tokens) for x in (self.restored_tokens, self.known_tokens))
        chat = [
            ("chat turns", f"{self.turns:,}", f"of {len(self.conversations)} conversations, on 2 workers in turn"),
            ("prompts", f"{self.prompt_tokens:,}", "tokens"),
            ("not recomputed", f"{self.restored_tokens:,}", "tokens, restored from the daemon"),
            ("hit rate", f"{hit_rate:.1f} %", f"of prompt tokens; {most:.1f} % were known"),
            ("memory tier", format_bytes(self.memory_bytes), f"for a chat of {format_bytes(self.chat_bytes)}"),
            ("evicted", f"{self.evictions:,}", "keys"),
        ]
        in_use = f"{format_bytes(self.disk_most_bytes)} in use, {self.demoted_keys:,} keys written"
        found = f"until it answered again; {self.keys_found:,} keys found"
        kills = [
            ("worker killed -9", format_ms(self.unmap_s), "until its memory was unmapped"),
            ("disk tier", format_bytes(self.disk_bytes), in_use),
            ("daemon killed -9", format_ms(self.restart_s), found),
            ("served from disk", f"{self.from_disk_after:,}", f"keys of {self.hits_after:,} after that"),
        ]
        wrong = f"{len(self.leaks)} leaks, {len(self.errors)} errors"
        verdict = [
            ("verified loads", f"{total('verified_loads'):,} of {total('loads'):,}", "every byte compared"),
            ("self-audit", f"{len(self.findings)} findings", wrong),
            ("wrong bytes", f"{total('wrong_bytes'):,}", "the point of it all"),
        ]
        small = "" if self.model == WHOLE else ", scaled down"
        title = f"kvoffloadd demo: {self.model}{small}, {self.layout}, {self.kv_heads} of {self.all_heads} KV heads"
        print_table(title, [chat, kills, verdict], good=self.is_good)
        print_wrong(self)
