"""Counters of the plug-in that SGLang exports with its own metrics (`--enable-metrics`)."""

from __future__ import annotations

from prometheus_client import Counter

# SGLang's processes have the folder of their metrics in their environment, before they import anything.
IGNORED_HINTS = Counter("sglang:kvoffloadd_ignored_hints", "Hints to retain pages, or unknown ones, that were ignored.")
LOST_CLAIMS = Counter("sglang:kvoffloadd_lost_claims", "Requests whose claims were lost, whole or in part.")
