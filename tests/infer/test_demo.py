"""The demo, on a pair small enough to run it in seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from eagle_jax import StreamChunk, viz
from infer import demo
from tests.infer.conftest import ByteTokenizer


def test_the_last_line_is_one_json_object(pair, capsys):
    demo.main(demo.Args(prompt="def f(", max_new_tokens=12, repetitions=1))
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert set(result) == {"identical", "tau", "speedup", "eagle_tok_s", "vanilla_tok_s", "machine"}
    assert result["identical"] is True
    assert result["tau"] >= 1
    assert result["speedup"] == pytest.approx(result["eagle_tok_s"] / result["vanilla_tok_s"], rel=0.01)
    assert "\x1b" not in "".join(lines)  # not a terminal: no colours


def test_the_text_does_not_depend_on_the_drafter_at_temperature_one(pair, capsys):
    demo.main(demo.Args(prompt="x", head="hass", max_new_tokens=12, temperature=1.0, seed=5, repetitions=1))
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["identical"] is True


def test_accepted_drafts_are_green(capsys):
    """Of a stream whose second chunk has two accepted tokens and one of the target's own."""
    chunks = [StreamChunk([*b"a"], 0), StreamChunk([*b"bcd"], 2), StreamChunk([*b"e"], 1)]
    assert demo.show(iter(chunks), ByteTokenizer(), True) == [*b"abcde"]
    assert capsys.readouterr().out == f"a{viz.GREEN}bc{viz.RESET}d{viz.GREEN}e{viz.RESET}\n\n"


def test_a_terminal_shows_colours(pair, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    demo.main(demo.Args(prompt="def f(", max_new_tokens=24, repetitions=1))
    out = capsys.readouterr().out
    assert "accepted drafts are green" in out
    assert "\x1b" in out
    monkeypatch.setenv("NO_COLOR", "1")
    demo.main(demo.Args(prompt="def f(", max_new_tokens=4, repetitions=1))
    assert "\x1b" not in capsys.readouterr().out


def test_colours_only_where_there_is_text():
    assert demo.paint("a", demo.GREEN, True) == "\x1b[32ma\x1b[0m"
    assert demo.paint("", demo.GREEN, True) == ""
    assert demo.paint("a", demo.GREEN, False) == "a"


@pytest.mark.parametrize("program", ["infer.demo", "train.head"])
def test_ctrl_c_while_importing_ends_it_silently(repository, program):
    # A suite that a shell runs in the background has SIGINT ignored, and its children would inherit that.
    start = (
        "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
        f"os.execv(sys.executable, [sys.executable, '-m', '{program}'])"
    )
    with subprocess.Popen([sys.executable, "-c", start], cwd=repository, stderr=subprocess.PIPE) as process:
        maps, begun = Path(f"/proc/{process.pid}/maps"), time.monotonic()
        if not maps.exists():
            time.sleep(0.7)
        while maps.exists() and b"numpy" not in maps.read_bytes():  # until the program's own imports run
            assert time.monotonic() - begun < 60, "it never came to its imports"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert err == b""


def test_ctrl_c_ends_it_with_one_line(repository, tmp_path):
    """Even while programs are being compiled, in threads that cannot be interrupted."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "empty")}
    # A suite that a shell runs in the background has SIGINT ignored, and its children would inherit that.
    start = (
        "import runpy, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "sys.argv[1:] = ['--max-new-tokens', '200']; "
        "runpy.run_module('infer.demo', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", start]
    with subprocess.Popen(
        command,
        cwd=repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Compiling for")
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert out.splitlines()[-1] == "Interrupted."
    assert process.returncode == 130
    assert "Traceback" not in err
