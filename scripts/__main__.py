"""`python -m scripts NAME [OPTIONS]`, or from any directory `python PATH/scripts NAME [OPTIONS]`."""

from __future__ import annotations

import ast
import os
import sys
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODULES = {
    "accuracy": "accuracy.__main__",
    "bench_copy": "bench.copy",
    "bench_disk": "bench.disk",
    "bench_engines": "bench.engines",
    "bench_layouts": "bench.layouts",
    "bench_lookup": "bench.lookup",
    "bench_recovery": "bench.recovery",
    "bench_remote": "bench.remote",
    "bench_rpc": "bench.rpc",
    "bench_serving": "vllm.serving.bench",
    "bench_sglang": "sglang.bench",
    "bench_submit": "bench.submit",
    "bench_vllm": "vllm.bench",
    "command_files": "command_files",
    "curve_error": "replay.curve_error",
    "demo_remote": "demo.remote",
    "dist": "dist.__main__",
    "flood": "fuzz.flood",
    "fuzz_daemon": "fuzz.__main__",
    "gpu_bundle": "gpu.bundle",
    "gpu_check": "gpu.__main__",
    "hostile": "fuzz.hostile",
    "legal_extremes": "extremes.__main__",
    "metric_tables": "metric_tables",
    "mutants": "mutants.__main__",
    "peers": "peers.__main__",
    "policy_table": "replay.table",
    "protocol_tables": "protocol_tables",
    "release": "dist.release",
    "replay_trace": "replay.__main__",
    "sglang_smoke": "sglang.smoke",
    "shape": "shape.__main__",
    "simulate_policies": "replay.policies",
    "soak": "soak.__main__",
    "stress": "stress.__main__",
    "stress_holes": "holes.__main__",
    "threads": "threads.__main__",
    "vllm_python": "vllm.python",
    "vllm_smoke": "vllm.smoke",
}
"""The module below `scripts` that has the `main` of each script."""


def summary(name: str) -> str:
    """The first line of the script's docstring. It is not imported: some need an engine's packages."""
    path = HERE / f"{MODULES[name].replace('.', '/')}.py"
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name not in MODULES:
        out = sys.stdout if name in ("-h", "--help") else sys.stderr
        lines = (f"  {known:18} {summary(known)}" for known in MODULES)
        try:
            print("usage: python -m scripts NAME [OPTIONS]\n", *lines, sep="\n", file=out, flush=True)
        except BrokenPipeError:  # who reads it has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # or the interpreter's end would try once more
        return 0 if out is sys.stdout else 2
    sys.path[0] = str(HERE.parent)  # where the package is; not this folder, which hides others' packages
    sys.argv = [f"scripts {name}", *sys.argv[2:]]
    status: int = import_module(f"scripts.{MODULES[name]}").main()
    return status


if __name__ == "__main__":
    sys.exit(main())
