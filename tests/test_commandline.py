"""Tests the words of the command line: its help, what it suggests for mistakes, its manual page and completions, and
how soon it answers and ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import xxhash

from kvoffloadd import __version__
from kvoffloadd.cli import main
from kvoffloadd.cli.about import GENERATED, SHELLS
from kvoffloadd.cli.arguments import COMMANDS, make_parser
from kvoffloadd.cli.parser import commands_of
from kvoffloadd.storage.disk.files import Files
from kvoffloadd.storage.disk.manifest import MANIFEST_NAME
from kvoffloadd.storage.disk.opening import open_root
from kvoffloadd.testing.wait import HANG_S
from scripts.command_files import command_files
from scripts.harness.daemon import Daemon

ROOT = Path(__file__).parent.parent
INTERRUPTED = (-signal.SIGINT, 130)
"""How a command ends by Ctrl-C: of the signal, or with the status that shells give that."""


Run = Callable[..., tuple[int, str, str]]


def run(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kvoffloadd", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False, timeout=HANG_S
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def run_here(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command in this process: no start of an interpreter for each of many cases."""

    def run_one(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as end:  # of argparse
            code = int(end.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run_one


# --- help -------------------------------------------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown() -> None:
    """The exit status is that of a usage error: a script may have lost the command."""
    code, out, err = run()
    assert (code, out) == (2, "")
    assert err == run("--help")[1]
    assert all(name in err for names in COMMANDS.values() for name in names)


def test_without_a_command_of_config_its_help_is_shown(run_here: Run) -> None:
    assert run_here("config") == (2, "", run_here("config", "--help")[1])


@pytest.mark.parametrize("words", [[], ["serve"], ["config"], ["config", "check"], ["help"]])
def test_help_is_a_command(run_here: Run, words: list[str]) -> None:
    found = run_here("help", *words)
    assert found == run_here(*words, "--help")
    assert found[0] == 0
    assert " ".join(words) in found[1]


def test_help_lists_all_commands() -> None:
    names = [name for name, _ in commands_of(make_parser())]
    assert sorted(names) == sorted(name for group in COMMANDS.values() for name in group)


# --- what was meant ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["statsu"], "kvoffloadd: error: unknown command 'statsu'; did you mean status?"),
        (["version"], "kvoffloadd: error: unknown command 'version'; did you mean --version?"),
        (["help", "srve"], "kvoffloadd: error: unknown command 'srve'; did you mean serve?"),
        (["config", "chekc"], "kvoffloadd config: error: unknown command 'chekc'; did you mean check?"),
        (["config", "x"], "kvoffloadd config: error: unknown command 'x'; known are check, show"),
        (["serve", "--mem", "8GiB"], "unrecognized arguments: --mem 8GiB; did you mean --memory?"),
        (["serve", "--memroy=8GiB"], "unrecognized arguments: --memroy=8GiB; did you mean --memory?"),
        (["drain", "--deadline", "5"], "unrecognized arguments: --deadline 5; did you mean --deadline-s?"),
        (["config", "show", "--sokcet", "x"], "kvoffloadd config show: error: unrecognized arguments: --sokcet x; did"),
        (["drain", "x"], "unrecognized arguments: x; `kvoffloadd drain --help` lists all options"),
        (["clear", "--force"], "unrecognized arguments: --force; `kvoffloadd clear --help` lists all options"),
        (["completion", "fihs"], "argument SHELL: invalid choice: 'fihs'; did you mean fish?"),
        (["plan", "--engine", "x"], "argument --engine: invalid choice: 'x'; known are any, vllm, sglang"),
    ],
)
def test_mistyped_words(run_here: Run, words: list[str], answer: str) -> None:
    code, out, err = run_here(*words)
    assert (code, out) == (2, "")
    assert answer in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["--socket", "/a b", "status"], ": kvoffloadd status --socket '/a b'"),
        (["--json", "status", "status"], ": kvoffloadd status --json status"),
        (["--memory=8GiB"], ""),
        (["--socket", "serve", "status"], ""),  # either could be the path
        (["--turns", "5", "status"], ""),
        (["--memory", "8GiB", "config", "show"], ""),
    ],
)
def test_options_before_the_command_are_put_behind_it_where_that_is_clear(
    run_here: Run, words: list[str], right: str
) -> None:
    option = words[0].partition("=")[0]
    code, _, err = run_here(*words)
    assert code == 2
    assert err.splitlines()[-1] == f"kvoffloadd: error: {option} comes after the command{right}"


def test_an_option_before_the_command_is_no_option_of_it(run_here: Run) -> None:
    code, _, err = run_here("--memory", "8GiB", "serve")
    assert code == 2
    assert "Traceback" not in err


# --- files that are made of the parser --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(command_files()))
def test_generated_files_are_those_of_the_parser(name: str) -> None:
    found = (GENERATED / name).read_text(encoding="utf-8")
    assert found == command_files()[name], "python -m scripts command_files --write"


def test_no_other_files_are_generated() -> None:
    assert {path.name for path in GENERATED.iterdir()} == set(command_files())


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_prints_the_script(run_here: Run, shell: str) -> None:
    assert run_here("completion", shell) == (0, command_files()[f"kvoffloadd.{shell}"], "")


def test_bash_completes_with_it() -> None:
    asked = 'source "$1"; COMP_WORDS=(kvoffloadd do); COMP_CWORD=1; _shtab_kvoffloadd; echo "${COMPREPLY[@]}"'
    command = ["bash", "-c", asked, "-", str(GENERATED / "kvoffloadd.bash")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.split() == ["doctor"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_with_it() -> None:
    asked = f"source {GENERATED}/kvoffloadd.fish; complete -C 'kvoffloadd do'"
    done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True, timeout=HANG_S)
    assert done.stdout.startswith("doctor")


def test_fish_knows_each_command_and_option() -> None:
    script = (GENERATED / "kvoffloadd.fish").read_text(encoding="utf-8")
    for name, command in commands_of(make_parser()):
        assert f" -a {name} " in script
        for action in command._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    assert re.search(rf"'_shtab_kvoffloadd_using {name}' .*-l {option[2:]} ", script), (name, option)


def test_man_prints_the_page(run_here: Run) -> None:
    assert run_here("man") == (0, command_files()["kvoffloadd.1"], "")


def test_the_page_has_all_commands_and_options_in_sections() -> None:
    page = (GENERATED / "kvoffloadd.1").read_text(encoding="utf-8").replace(r"\-", "-")
    assert re.findall(r"^\.SH (.*)$", page, re.MULTILINE)[:3] == ["NAME", "SYNOPSIS", "DESCRIPTION"]
    for name, command in commands_of(make_parser()):
        (section,) = re.findall(
            rf'^\.SS "kvoffloadd {name}(?: [A-Z][^"]*)?"\n((?:(?!\.S[SH]).*\n)*)', page, re.MULTILINE
        )
        options = re.findall(r"\\fB(--[a-z-]+)", section)
        expected = [option for action in command._actions for option in action.option_strings]
        assert options == [option for option in expected if option not in ("-h", "--help")]


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_groff_finds_nothing_wrong_with_the_page() -> None:
    command = ["groff", "-man", "-ww", "-z", str(GENERATED / "kvoffloadd.1")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")


# --- how soon ---------------------------------------------------------------------------------------------------------

IMPORTED = """
import atexit, sys
before = set(sys.modules)
atexit.register(lambda: print(*sorted(set(sys.modules) - before), file=sys.stderr))
if sys.argv[1:2] == ["argparse"]:
    import argparse
    argparse.ArgumentParser().format_help()
else:
    from kvoffloadd.cli import main
    sys.exit(main())
"""
SLOW = {"numpy", "msgpack", "msgspec", "rich", "asyncio", "socket", "logging", "dataclasses", "tomllib", "json",
        "subprocess", "importlib.metadata", "importlib.resources", "decimal", "shtab", "inspect", "typing_extensions",
        "kvoffloadd.config", "kvoffloadd.model", "kvoffloadd.client", "kvoffloadd.cli.commands"}  # fmt: skip


def loaded_by(*words: str) -> set[str]:
    """The modules that this command loads. "argparse": those of a help that Python's own parser shows."""
    # Without `site`, whose imports differ between environments.
    command = [sys.executable, "-S", "-c", IMPORTED, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, env=environment)
    assert done.returncode == 0
    return set(done.stderr.split())


@pytest.mark.parametrize(
    "words", [["--version"], ["--help"], ["completion", "bash"], ["completion", "fish"], ["man"], ["help", "serve"]]
)
def test_answers_about_the_command_line_load_nothing_slow(words: list[str]) -> None:
    """No time is measured: these modules are most of the half second that other commands take to start."""
    loaded = loaded_by(*words)
    assert "kvoffloadd.cli.arguments" in loaded
    assert loaded & SLOW <= loaded_by("argparse")  # which loads more from Python 3.14 on


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_an_interrupt_within_a_finalizer_is_not_lost() -> None:
    """Python drops its exception, and tells only standard error."""
    program = """
import os, signal
from kvoffloadd.cli import interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever has started the tests
class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
interrupts.interrupt_command()
interrupts.raise_if_interrupted()
Finalized()
try:
    interrupts.raise_if_interrupted()
except KeyboardInterrupt:
    print("raised again")
interrupts.interrupt_command()  # the next command of this process
interrupts.raise_if_interrupted()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT
    )
    assert (done.returncode, done.stdout) == (0, "raised again\n"), done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_has_cleaned_up_ends_silently(number: signal.Signals) -> None:
    """Nobody would handle an exception at the interpreter's end."""
    program = (
        "import os, signal, sys; from kvoffloadd.cli import interrupts\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # whoever has started the tests
        "interrupts.interrupt_command(); interrupts.end_silently(); os.kill(os.getpid(), int(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT)
    assert (done.returncode, done.stderr) == (-number, "")


INTERRUPT_AT_IMPORT = """
import os, signal, sys
module = sys.argv.pop(1)
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.modules.pop(module, None)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvoffloadd.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("kvoffloadd.cli.interrupts", ["--version"]),
        ("kvoffloadd.cli.run", ["--version"]),
        ("argparse", ["--version"]),
        ("numpy", ["status"]),
        ("kvoffloadd.client", ["status"]),
        ("kvoffloadd.daemon", ["serve", "--memory", "16MiB", "--socket", "/none/k.sock"]),
        ("kvoffloadd.demo.main", ["demo"]),
        ("kvoffloadd.cli.top.screen", ["top"]),
    ],
)
def test_an_interrupt_amid_imports_is_silent(module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", INTERRUPT_AT_IMPORT, module, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT)
    assert done.returncode in INTERRUPTED
    assert (done.stdout, done.stderr) == ("", "")


AT_THE_END = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvoffloadd.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("words", [["--version"], ["config", "show"], ["top", "--socket", "/none"]])
def test_an_interrupt_at_the_interpreter_s_end_is_silent(words: list[str]) -> None:
    command = [sys.executable, "-c", AT_THE_END, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT)
    assert done.returncode == -signal.SIGINT
    assert "Traceback" not in done.stderr
    assert "KeyboardInterrupt" not in done.stderr


def test_an_interrupt_that_a_shell_ignores_stays_ignored() -> None:
    command = "trap '' INT; exec \"$@\""
    ignoring = ["sh", "-c", command, "-", sys.executable, "-c", INTERRUPT_AT_IMPORT.replace(
        "signal.signal(signal.SIGINT, signal.default_int_handler)", ""), "argparse", "--version"]  # fmt: skip
    done = subprocess.run(ignoring, capture_output=True, text=True, check=False, timeout=HANG_S, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"kvoffloadd {__version__}\n", "")


# --- `serve` and `top` at a terminal and without ----------------------------------------------------------------------


def test_top_without_a_terminal_prints_once(start_daemon: Callable[..., Daemon]) -> None:
    code, out, err = run("top", "--socket", str(start_daemon().socket), "--interval", "0.1")
    assert (code, err) == (0, "")
    assert out.count("serving") == 1


@pytest.mark.parametrize("options", [[], ["--json"], ["--once"]])
def test_top_without_a_terminal_does_not_wait_for_a_daemon(socket_dir: Path, options: list[str]) -> None:
    path = socket_dir / "none.sock"
    code, out, err = run("top", "--socket", str(path), *options)
    assert (code, out) == (3, "")
    assert (str(path) in err, len(err.splitlines())) == (True, 1)


@pytest.mark.slow
def test_top_says_once_that_its_daemon_is_gone(start_daemon: Callable[..., Daemon]) -> None:
    daemon = start_daemon()
    words = ["top", "--json", "--socket", str(daemon.socket), "--interval", "0.1"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvoffloadd", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as top:
        assert top.stdout is not None
        assert json.loads(top.stdout.readline())["pid"] == daemon.pid
        assert daemon.stop() == 0
        daemon.start()
        while json.loads(top.stdout.readline())["pid"] != daemon.pid:
            pass
        top.send_signal(signal.SIGINT)
        _, err = top.communicate(timeout=HANG_S)
    reasons = err.splitlines()
    assert all(reason.startswith("kvoffloadd: waiting for the daemon: ") for reason in reasons)
    assert 0 < len(reasons) == len(set(reasons))
    assert top.returncode == 0


def test_serve_prints_the_sizes_and_the_next_step(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    daemon = start_daemon(memory="16MiB", options=("--disk", f"{tmp_path}/root=32MiB"))
    assert daemon.says(f"serving at {daemon.socket}, 16 MiB in memory, 32 MiB on disk\n")
    assert daemon.says(f"next: `kvoffloadd flags vllm --socket {daemon.socket}` prints an engine's flag")


def test_serve_says_which_of_the_config_s_roots_it_has(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    roots = (f'{{ path = "{tmp_path}/{name}", capacity = "32MiB" }}' for name in ("root", "file"))
    daemon = start_daemon(f"disk.roots=[{', '.join(roots)}]", memory="16MiB")
    assert daemon.says("16 MiB in memory, 32 MiB on disk (1 of 2 roots)\n")
    assert daemon.says("WARNING")


def serve_on(socket_dir: Path, *roots: Path) -> tuple[int, str, str]:
    """Serves on these roots, and a daemon that is refused leaves no socket."""
    disks = [word for root in roots for word in ("--disk", f"{root}=32MiB")]
    ended = run("serve", "--socket", str(socket_dir / "k.sock"), "--memory", "16MiB", *disks)
    assert not (socket_dir / "k.sock").exists()
    return ended


@pytest.mark.parametrize(
    ("path", "found", "remedy"),
    [
        ("missing/root", "does not exist", "correct the path, or mount its file system; then install -d -m 700 -o "),
        ("open", "has mode 755, so that other users may enter it", "install -d -m 700 -o "),
        ("file", "is not a directory", "name a directory of its own"),
        ("/proc/root", "can't be opened: No such file", "name another directory"),  # where nobody can make one
        ("entered", "can't be opened: ", "name another directory, or empty this one"),
    ],
)
def test_serve_refuses_a_disk_that_it_can_not_use(socket_dir: Path, path: str, found: str, remedy: str) -> None:
    (socket_dir / "open").mkdir()
    (socket_dir / "open").chmod(0o755)
    (socket_dir / "file").touch()
    (socket_dir / "entered").mkdir(0o700)
    (socket_dir / "entered/segments").mkdir(0o755)
    (socket_dir / "good").mkdir(0o700)
    code, out, err = serve_on(socket_dir, socket_dir / "good", socket_dir / path)
    assert (code, out) == (2, "")
    heading, problem, advice = err.splitlines()
    assert heading == "kvoffloadd: --disk can't be used:"
    assert problem.startswith(f"disk {socket_dir / path}: {found}")
    assert advice.startswith(f"  -> {remedy}")


def test_serve_refuses_a_disk_of_another_daemon(socket_dir: Path) -> None:
    root = socket_dir / "root"
    fds = open_root(Files(), root, make_root=True, make_segments=True, make_lock=True)
    try:
        code, _, err = serve_on(socket_dir, root)
    finally:
        for fd in fds:
            os.close(fd)
    assert code == 2
    assert f"disk {root}: is in use by another process\n  -> end that process" in err


def test_serve_refuses_a_disk_of_a_newer_version(socket_dir: Path) -> None:
    """It does not take its clears for damage."""
    root = socket_dir / "root"
    root.mkdir(0o700)
    text = b'{"version": 99}\n'
    (root / MANIFEST_NAME).write_bytes(text + b"xxh3_128 " + xxhash.xxh3_128_hexdigest(text).encode() + b"\n")
    code, _, err = serve_on(socket_dir, root)
    assert code == 2
    assert f"disk {root}: the manifest has version 99" in err


def test_serve_looks_for_another_daemon_before_disks(start_daemon: Callable[..., Daemon], tmp_path: Path) -> None:
    """The same command, typed twice: the disk is in use, too, but that is not the reason."""
    disk = ("--disk", f"{tmp_path}/root=32MiB")
    daemon = start_daemon(memory="16MiB", options=disk)
    code, _, err = run("serve", "--socket", str(daemon.socket), "--memory", "16MiB", *disk)
    assert code == 2
    assert str(daemon.socket) in err
    assert "--disk" not in err
