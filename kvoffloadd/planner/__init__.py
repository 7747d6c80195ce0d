"""Derives what a model's KV cache will be before anything runs: groups, pages, descriptors, and how much the tiers
hold.

`read_model` reads a Hugging Face config.json. `make_plan` derives the rest with `kvoffloadd.layout`'s own geometry,
`make_sglang_plan` with SGLang's host pools. `kvoffloadd plan` prints the plan. Importing this package loads no torch,
and of the daemon only the modules that plan copies.
"""

from kvoffloadd.planner.capacity import DiskSpace, MemorySpace, demand_of
from kvoffloadd.planner.grouping import form_groups
from kvoffloadd.planner.layouts import KV_APART, Layout
from kvoffloadd.planner.modelconfig import ModelConfig, read_model
from kvoffloadd.planner.planning import CapacityPlan, PlanInputs, make_plan
from kvoffloadd.planner.rank import KV_DTYPES, Rank
from kvoffloadd.planner.sglang import PAGE_TOKENS, SglangPlan, make_sglang_plan
from kvoffloadd.planner.trace import Trace, read_trace

__all__ = [
    "KV_APART",
    "KV_DTYPES",
    "PAGE_TOKENS",
    "CapacityPlan",
    "DiskSpace",
    "Layout",
    "MemorySpace",
    "ModelConfig",
    "PlanInputs",
    "Rank",
    "SglangPlan",
    "Trace",
    "demand_of",
    "form_groups",
    "make_plan",
    "make_sglang_plan",
    "read_model",
    "read_trace",
]
