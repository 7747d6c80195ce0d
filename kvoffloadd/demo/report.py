"""The results of the demo: figures, verdict, table and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvoffloadd.demo.chat import ChatTurn
from kvoffloadd.demo.kvcache import MODEL
from kvoffloadd.demo.worker import TurnAnswer
from kvoffloadd.testing.output import SHOWN, format_ms, print_table, print_wrong, ratio
from kvoffloadd.units import format_bytes


@dataclass(slots=True)
class DemoReport:
    """All figures of one demo.

    `chat_bytes`: the KV cache of all conversations. `known_tokens`: tokens of prompts that earlier turns had; no cache
    can restore more. `..._after`: figures of the restores after the daemon's restart.
    """

    seed: int
    memory_bytes: int
    chat_bytes: int
    disk_bytes: int
    seconds: float = 0.0
    turns: int = 0
    conversations: set[int] = field(default_factory=set)
    prompt_tokens: int = 0
    known_tokens: int = 0
    restored_tokens: int = 0
    from_disk: int = 0
    loads: int = 0
    verified_loads: int = 0
    wrong_bytes: int = 0
    stray_bytes: int = 0
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

    def count(self, turn: ChatTurn, answer: TurnAnswer) -> None:
        """Counts a turn that was answered."""
        self.turns += 1
        self.conversations.add(turn.conversation)
        self.prompt_tokens += turn.prompt_tokens
        self.known_tokens += turn.known_tokens
        self.restored_tokens += answer.restored_tokens
        self.from_disk += answer.from_disk
        self._count_bytes(answer)

    def count_after(self, answer: TurnAnswer) -> None:
        """Counts a turn that was answered again, after the daemon's restart."""
        self.restored_after += answer.restored_tokens
        self.hits_after += answer.hits
        self.from_disk_after += answer.from_disk
        self._count_bytes(answer)

    def _count_bytes(self, answer: TurnAnswer) -> None:
        self.loads += answer.loads
        self.verified_loads += answer.loads and not answer.wrong_bytes + answer.stray_bytes
        self.wrong_bytes += answer.wrong_bytes
        self.stray_bytes += answer.stray_bytes

    def note_disk(self, status: dict[str, Any], used: int) -> None:
        """Notes a daemon's counters and bytes on disk at the end of its run."""
        self.disk_most_bytes = max(self.disk_most_bytes, used)
        self.demoted_keys += status["disk"]["demoted"]["keys"]
        self.corrupt += status["disk"]["corrupt"]
        if used > self.disk_bytes:
            self.errors.append(f"{used} bytes on disk, which may have {self.disk_bytes}")

    @property
    def is_good(self) -> bool:
        """Returns whether everything is right, and something was checked."""
        bad = self.wrong_bytes + self.stray_bytes + self.corrupt
        found = self.findings or self.leaks or self.errors
        return not bad and not found and self.verified_loads > 0 and self.from_disk_after > 0

    def figures(self) -> str:
        """Returns the figures for the progress bar."""
        hit_rate = 100 * ratio(self.restored_tokens, self.prompt_tokens)
        return f"{self.restored_tokens:,} tokens restored, {hit_rate:.0f} %, {self.wrong_bytes} wrong"

    def as_json(self) -> dict[str, object]:
        """Returns the figures by stable keys."""
        return {
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "memory_bytes": self.memory_bytes,
            "model": MODEL,
            "chat_bytes": self.chat_bytes,
            "turns": self.turns,
            "conversations": len(self.conversations),
            "prompt_tokens": self.prompt_tokens,
            "known_tokens": self.known_tokens,
            "restored_tokens": self.restored_tokens,
            "hit_rate": round(ratio(self.restored_tokens, self.prompt_tokens), 4),
            "from_disk_keys": self.from_disk,
            "loads": self.loads,
            "verified_loads": self.verified_loads,
            "wrong_bytes": self.wrong_bytes,
            "stray_bytes": self.stray_bytes,
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
        """Prints the table, and below it each problem."""
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
            ("verified loads", f"{self.verified_loads:,} of {self.loads:,}", "every byte compared"),
            ("self-audit", f"{len(self.findings)} findings", wrong),
            ("wrong bytes", f"{self.wrong_bytes + self.stray_bytes:,}", "of all that was loaded"),
        ]
        title = f"kvoffloadd demo: the KV cache of {MODEL}, 2 of its 8 KV heads"
        print_table(title, [chat, kills, verdict], good=self.is_good)
        print_wrong(self)
