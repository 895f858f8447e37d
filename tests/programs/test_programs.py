"""Checks what all programs share: arguments, configuration files, errors, logs and Ctrl-C."""

from __future__ import annotations

import dataclasses
import importlib
import io
import logging
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import types
import typing
import warnings
from pathlib import Path

import pytest

import train.bench_step
import train.distill
import train.evaluate
import train.export
import train.features
import train.head
import train.regenerate
import train.target
from eagle_jax.config import ConfigError, TreeConfig
from eagle_jax.models.quantised import Scheme
from infer import acceptance, bench, chat, cycle, demo, tune
from infer.aot import __main__ as aot
from infer.common import interrupts
from infer.common.programs import arguments, can_write, listed, naming, parse_tree, run
from infer.papers import __main__ as papers

TARGETS = (
    acceptance, aot, bench, chat, cycle, demo, tune, train.distill, train.evaluate, train.features, train.head,
    train.regenerate,
)  # fmt: skip
"""Programs that load a target, or compile one."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of a program."""

    size: int = 3  # how large
    name: str = "a"  # how called


@pytest.mark.parametrize("words", ["--config FILE --size 7", "--size 7 --config FILE", "--size 7 --config=FILE"])
def test_a_configuration_file_gives_defaults(words, tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("size: 5\nname: b\n")
    assert arguments(Args, None, words.replace("FILE", str(path)).split()) == Args(7, "b")


def test_a_wrong_configuration_file_is_an_error(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text("sise: 5\n")
    for name, message in (("c", "key must be .*, got 'sise'. Did you mean"), ("d", "No such file or directory$")):
        with pytest.raises(ConfigError, match=rf"^--config \S*{name}\.yaml: {message}"):
            arguments(Args, None, ["--config", str(tmp_path / f"{name}.yaml")])
    with pytest.raises(SystemExit):
        arguments(Args, None, ["--size", "2", "--config"])
    assert "argument --config: expected one argument" in capsys.readouterr().err


def test_help_names_the_program_the_file_and_every_option(capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="train.head"))
    with pytest.raises(SystemExit):
        arguments(Args, "Does it.\n\n    python -m it", ["--help"])
    out = capsys.readouterr().out
    for text in ("usage: python -m train.head", "Does it.", "--config FILE.yaml", "how large", "how called"):
        assert text in out


@pytest.fixture
def call(monkeypatch):
    """Runs a main function as a program and returns its exit status; logging and warnings are restored."""
    monkeypatch.setattr("sys.argv", ["it"])
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def program(main, **options):
        with pytest.raises(SystemExit) as caught:
            run(main, Args, None, **options)
        return caught.value.code

    yield program
    root.handlers[:], root.level = handlers, level


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        (None, 0),
        (1, 1),
        ({"a": 1}, 0),
        (ValueError("size is wrong"), "error: size is wrong"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), "error: x.json: No such file or directory"),
        (OSError("disk full"), "error: disk full"),
    ],
    ids=str,
)
def test_a_program_ends_with_a_status_or_an_error_message(outcome, code, call):
    def main(args):
        assert args == Args()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert call(main) == code


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("sys.argv", ["it"])
    with pytest.raises(ZeroDivisionError):
        run(lambda args: 1 / 0, Args, None)


@pytest.mark.parametrize("name", ["grain", "tensorboardX"])
def test_a_missing_package_is_named_with_its_extra(name, call, repository, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    extra = tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"]["train"]
    assert any(package.startswith(name) for package in extra)
    message = f"error: {name} must be installed, got no such package. Run python -m pip install -e '.[train]'."
    assert call(lambda args: importlib.import_module(name)) == message
    monkeypatch.setitem(sys.modules, "msgspec", None)  # always installed: its absence is a bug
    with pytest.raises(ModuleNotFoundError):
        run(lambda args: importlib.import_module("msgspec"), Args, None)


def test_a_warning_is_one_line(call, capsys):
    call(lambda args: warnings.warn("assumed", stacklevel=2))
    assert capsys.readouterr().err == "warning: assumed\n"


@pytest.mark.parametrize(("log", "line"), [("plain", r"begun\n"), ("timed", r"[\d-]+ [\d:,]+ begun\n")])
def test_a_program_logs_despite_earlier_handlers(log, line, call, capsys):
    """Orbax imports absl, which puts a handler on the root logger."""
    logging.getLogger().addHandler(logging.NullHandler())
    call(lambda args: logging.info("begun"), log=log)
    assert re.fullmatch(line, capsys.readouterr().err)


def test_a_printed_line_is_written_at_once(call, monkeypatch):
    """A buffered line would be lost if the program were killed."""
    file = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(file))

    def main(args):
        print("begun")
        assert file.getvalue() == b"begun\n"

    assert call(main) == 0


def test_errors_name_their_option_once(tmp_path):
    path = tmp_path / "x"
    for inner, message in (
        (ConfigError("no such thing"), "--head a: no such thing"),
        (ConfigError("--head b: no such thing"), "--head b: no such thing"),
        (ConfigError("a: no such thing"), "--head a: no such thing"),
        (ValueError("no"), "--head a: no"),
    ):
        with pytest.raises(type(inner), match=f"^{message}$"), naming("--head", "a"):
            raise inner
    with pytest.raises(ValueError, match=f"^--head {path}: No such file or directory$"), naming("--head", path):
        path.read_text()


@pytest.mark.parametrize("program", TARGETS, ids=lambda program: program.__name__)
def test_every_program_that_loads_a_target_quantises_it_by_one_option(program, capsys):
    assert typing.get_type_hints(program.Args)["weights"] == Scheme | None
    with pytest.raises(SystemExit):
        arguments(program.Args, None, ["--weights", "int2"])
    assert "--weights" in (error := capsys.readouterr().err) and "int8" in error and "int2" in error


def test_a_program_without_a_frozen_target_lacks_the_option():
    for program in (papers, train.bench_step, train.export, train.target):
        assert "weights" not in typing.get_type_hints(program.Args), program


def test_a_tree_is_parsed():
    assert parse_tree("2,2,6") == TreeConfig(2, 2, 6)
    with pytest.raises(ValueError, match="--tree must be depth,top_k,num_nodes, got '6x10'"):
        parse_tree("6x10")
    with pytest.raises(ConfigError, match=r"^--tree 2,2,7: TreeConfig\.num_nodes must be at most 6"):
        parse_tree("2,2,7")


def test_a_list_is_split_at_commas():
    assert listed(Args(name=" b, a,b"), "name") == ["b", "a"]
    assert listed(Args(name="1,0.5"), "name", float, 0) == [1.0, 0.5]
    for text, kind, least, message in [
        (" , ", str, None, "--name must have at least one value"),
        ("a", float, None, "--name must be numbers, got 'a'. Separate"),
        ("0,1", int, 1, "--name must be whole numbers of at least 1, got '0,1'"),
        ("inf", float, 0, "--name must be numbers of at least 0, got 'inf'"),
        ("nan", float, 0, "--name must be numbers of at least 0, got 'nan'"),
    ]:
        with pytest.raises(ValueError, match=message):
            listed(Args(name=text), "name", kind, least)


def test_an_output_that_cannot_be_written_is_an_error(tmp_path):
    can_write(tmp_path / "new" / "folder")
    can_write(tmp_path / "profile.yaml", folder=False)
    assert list(tmp_path.iterdir()) == []
    (file := tmp_path / "notes.txt").touch()
    can_write(file, folder=False)  # is replaced
    for path, folder, message in [
        (file, True, r"--out must be a directory, got .*notes\.txt\. Choose"),
        (tmp_path, False, r"--out must be a file, got .*\. Choose"),
        (file / "below" / "it", True, r"--out must be writable, got .*below/it: .*notes\.txt: Not a directory"),
    ]:
        with pytest.raises(ValueError, match=message):
            can_write(path, folder=folder)


BUSY = """
import dataclasses, signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for a suite in the background
import jax
from infer.common import programs

@dataclasses.dataclass(frozen=True)
class Args:
    pass

def main(args):
    def billion(_, x):
        return jax.lax.fori_loop(0, 10**9, lambda i, x: x * 0.999 + 0.5, x)

    endless = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, billion, x)).lower(1.0).compile()
    print("begun", flush=True)
    if PLACE == "thread":
        threading.Thread(target=lambda: endless(1.0).block_until_ready(), daemon=True).start()
        time.sleep(600)
    endless(1.0).block_until_ready()

programs.run(main, Args, None)
"""


@pytest.mark.parametrize("place", ["main", "thread"])
def test_a_program_ends_while_xla_is_busy(place, repository):
    """The first Ctrl-C ends it if XLA runs in a thread, the second one if in the main thread; two at once are one."""
    command = [sys.executable, "-c", f"PLACE = {place!r}\n{BUSY}"]
    with subprocess.Popen(command, cwd=repository, text=True, stdout=-1, stderr=-1) as process:
        try:
            assert process.stdout.readline() == "begun\n"
            time.sleep(0.5)  # until it runs
            process.send_signal(signal.SIGINT)
            if place == "main":
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                lines = [process.stderr.readline(), process.stderr.readline()]
                assert lines[0] == "\n" and "Press Ctrl-C once more to end the program." in lines[1]
                time.sleep(0.3)
                assert process.poll() is None
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130
    assert (out, err) == (("", "\nInterrupted.\n") if place == "main" else ("\nInterrupted.\n", ""))


@pytest.mark.parametrize("program", ["infer.demo", "train.head"])
def test_ctrl_c_while_importing_ends_a_program_silently(repository, program):
    # A shell ignores SIGINT for a suite in the background, and child processes would inherit that.
    start = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        f"os.execv(sys.executable, [sys.executable, '-m', '{program}'])"
    )
    with subprocess.Popen([sys.executable, "-c", start], cwd=repository, stderr=subprocess.PIPE) as process:
        maps, begun = Path(f"/proc/{process.pid}/maps"), time.monotonic()
        if not maps.exists():
            time.sleep(0.7)
        while maps.exists() and b"numpy" not in maps.read_bytes():  # until the program's own imports run
            assert time.monotonic() - begun < 60, "the program did not import NumPy"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err == b""


@pytest.fixture
def default_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
    signal.set_wakeup_fd(-1)


def test_ctrl_c_without_a_wait_prints_nothing(default_handler, capfd, monkeypatch):
    """Python may handle two signals as one."""
    monkeypatch.setattr(interrupts, "PATIENCE", 0.3)
    interrupts.handle_interrupts()

    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        wait()
    time.sleep(0.5)
    assert capfd.readouterr().err == ""


def test_an_ignored_signal_stays_ignored(default_handler):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.handle_interrupts()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_an_interrupt_in_a_garbage_collector_callback_is_repeated(default_handler):
    """Python drops an exception that is raised inside JAX's callback."""

    def _xla_gc_callback():
        interrupts.interrupt(signal.SIGINT, sys._getframe())

    signal.signal(signal.SIGINT, interrupts.interrupt)
    _xla_gc_callback()
    with pytest.raises(KeyboardInterrupt):
        time.sleep(5)
