"""The chat as a program: Ctrl-C wherever it comes, what it refuses, and turns in a terminal."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from eagle_jax import viz
from infer import chat
from tests.infer.chats import last


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_never_ends_the_program(times, make_chat, monkeypatch, capsys):
    """Once it stops the reply; what cannot stop, or has not begun, is interrupted, and the chat goes on without it."""
    typed = iter(["hello", "again"])

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    talk = make_chat(max_new_tokens=100)
    real = talk.session.stream

    def interrupted(*args, **options):
        for number, chunk in enumerate(real(*args, **options)):
            talk.session.stream = real
            for _ in range(times if number == 3 else 0):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)  # until Python has heard it
            yield chunk

    monkeypatch.setattr(chat, "load_pair", lambda sources: (talk.target, talk.tokenizer))
    monkeypatch.setattr(chat, "Chat", lambda *args: talk)
    monkeypatch.setattr(chat, "use_compilation_cache", lambda: None)
    monkeypatch.setattr("builtins.input", ask)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        talk.session.stream = interrupted
        chat.main(chat.Args(method="vanilla"))
    finally:
        signal.signal(signal.SIGINT, before)
    said = [text for text in talk.written if text.startswith("[")]
    if times == 1:
        assert said[0].endswith("stopped]\n") and len(said) == 2
        assert len(talk.conversation.messages) == 4
    else:
        assert said[0] == "[interrupted: this turn is forgotten]\n" and len(said) == 2
        assert talk.conversation.messages[0]["content"] == "again"


def test_ctrl_c_stops_the_reply_and_what_was_said_stays(make_chat):
    talk = make_chat(max_new_tokens=200)
    real = talk.session.stream

    def interrupted(*args, **options):
        for number, chunk in enumerate(real(*args, **options)):
            if number == 3:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.05)  # until Python has heard it
            yield chunk

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        talk.session.stream = interrupted
        talk.line("hello")
        assert last(talk).endswith("prompt tokens read, stopped]\n")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert 0 < len(talk.conversation.messages[-1]["content"].encode("utf-8", "replace")) < 600
    assert talk.tallies[False].tokens < 200
    talk.session.stream = real
    talk.line("go on")
    assert "stopped" not in last(talk)


def test_a_second_ctrl_c_interrupts_what_does_not_stop():
    event = threading.Event()
    with chat.stopping(event):
        signal.raise_signal(signal.SIGINT)
        assert event.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "eagle9"], "unknown method 'eagle9'"),
        (["--temperature", "-1"], "--temperature -1.0 must not be negative"),
        (["--temperature", "1", "--top-p", "2"], "top_p=2.0 must lie in (0, 1]"),
        (["--context", "1"], "--context 1: context must be an integer from 2 to the target's 2048 positions, got 1"),
        (["--context", "5"], "--context 5 leaves no room for question and reply: give 32 or more"),
        (["--chat-template", "/nope.jinja"], "--chat-template /nope.jinja: no such chat template: give a Jinja file"),
        (["--target", "/nope", "--method", "pld"], "--target /nope"),
        (
            ["--target", "/nope"],
            "--target /nope says what answers, and nothing what drafts: give its head, as --eagle3 PATH, or",
        ),
        (["--eagle3", "/nope"], "no such directory: /nope"),
        (["--eagle3", "/nope", "--hydra", "/no"], "heads of hydra and eagle3 are given: say which one drafts, as --me"),
        (
            ["--eagle3", "/nope", "--method", "pld"],
            "--eagle3 is given, and --method pld has no use for it: add --me",
        ),
        (["--seed", "4294967296"], "--seed 4294967296 must lie in 0 to 2**32 - 1"),
    ],
)
def test_what_cannot_be_meant_is_one_line(options, message, repository):
    command = [sys.executable, "-m", "infer.chat", *options]
    done = subprocess.run(command, cwd=repository, input="", capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_the_program_in_a_terminal(repository):
    """Turns of the bundled pair, a Ctrl-C at the prompt and two in a reply: only /quit ends it."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "infer.chat", "--max-new-tokens", "24"]
    with subprocess.Popen(command, cwd=repository, stdin=follower, stdout=follower, stderr=follower,
                          start_new_session=True) as process:  # fmt: skip
        os.close(follower)
        seen = ""

        def until(word, count=1, *others):
            """All that was shown, once the word has come so often, or one of the others at all."""
            nonlocal seen
            begun = time.monotonic()
            while seen.count(word) < count and not any(other in seen for other in others):
                ready, _, _ = select.select([leader], [], [], max(0.0, begun + 300 - time.monotonic()))
                assert ready, seen  # a read alone would wait for ever
                seen += os.read(leader, 4096).decode("utf-8", "replace")

        until("\r\n> ")
        os.write(leader, b"What is 2 + 2?\n")
        until("prompt tokens read")
        assert viz.GREEN in seen
        until("\r\n> ", 2)
        process.send_signal(signal.SIGINT)
        until("ends the chat]")
        os.write(leader, b"And 3 + 3?\n")
        until("prompt tokens read", 2)
        until("\r\n> ", 4)
        os.write(leader, b"And 4 + 4?\n")
        until("And 4 + 4?")
        for _ in range(2):  # wherever it is by now: reading the line or the prompt, in the reply, at the next line
            process.send_signal(signal.SIGINT)
        until("ends the chat]", 2, "stopped]", "interrupted: this turn is forgotten")
        os.write(leader, b"/stats\n")
        until("tokens known")
        os.write(leader, b"/quit\n")
        assert process.wait(60) == 0
    os.close(leader)
