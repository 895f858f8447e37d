"""The chat: what its lines do, and that the text is what the target says to the whole conversation."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

import jax
import pytest

import eagle_jax
from eagle_jax import viz
from eagle_jax.session import Session
from infer import chat
from tests.infer.conftest import ByteTokenizer
from tests.infer.screen import Screen


class Templated(ByteTokenizer):
    """Turns between marks, as chat templates write them."""

    chat_template = "marks"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        marks = {"system": "<s>", "user": "<u>", "assistant": "<a>"}
        text = "".join(marks[message["role"]] + message["content"] + "\n" for message in messages)
        return text + "<a>" * add_generation_prompt


@pytest.fixture
def make(pair, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def of(tokenizer=None, **options):
        args = chat.Args(**{"max_new_tokens": 12, "context": 400} | options)
        _, drafter, _ = eagle_jax.load_demo("hass")
        written: list[str] = []
        found = chat.Chat(args, pair, drafter, tokenizer or Templated(), written.append)
        found.written = written
        return found

    return of


def last(talk) -> str:
    return talk.written[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_reply_is_the_targets_own_to_the_whole_conversation(make, pair, temperature, monkeypatch):
    asked = []
    real = Session.stream

    def watched(session, prompt, **options):
        asked.append(prompt)
        return real(session, prompt, **options)

    monkeypatch.setattr(Session, "stream", watched)
    talk = make(temperature=temperature, seed=5, system="be brief")
    messages = [{"role": "system", "content": "be brief"}]
    for turn, said in enumerate(("hello", "and then?", "x"), 1):
        messages.append({"role": "user", "content": said})
        talk.line(said)
        text = Templated().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert Templated().decode(asked[-1]) == text
        key = jax.random.fold_in(jax.random.key(5), turn)
        expected = eagle_jax.generate(pair, None, [asked[-1]], max_new_tokens=12, temperature=temperature, key=key)
        assert talk.session.text == [*asked[-1], *expected.tokens[0]]
        messages.append({"role": "assistant", "content": Templated().decode(expected.tokens[0])})
        assert talk.conversation.messages == messages
    assert talk.tallies[False].replies == 3 and talk.tallies[False].tokens == 36


def test_only_what_is_new_is_read(make):
    talk = make(TextOnly())
    talk.line("hello")
    first, new = len("<u>hello\n<a>"), len("\n<u>why\n<a>")
    assert f"{first} of {first} prompt tokens read" in last(talk)
    talk.line("why")  # the last token of the reply is in no cache yet
    assert f"{new + 1} of {first + 12 + new} prompt tokens read" in last(talk)


def test_plain_replies_go_on_from_the_same_cache(make):
    """The target reads what is new; the drafter, wanted again, what was said since."""
    talk = make(TextOnly())
    new = len("\n<u>why\n<a>") + 1
    talk.line("hello")
    talk.line("/plain")
    talk.line("why")
    assert "tau 1.00" in last(talk) and f", {new} of " in last(talk)
    talk.line("why")
    assert "tau 1.00" in last(talk) and f", {new} of " in last(talk)
    talk.line("/plain")
    talk.line("why")  # two turns that it has not seen, each with a reply of 12, and this one
    assert f", {3 * new + 2 * (12 - 1)} of " in last(talk)


def test_special_tokens_in_a_reply_stay_in_the_text(make):
    """A model that begins a turn of its own, as small ones do: what follows is still only what is new."""

    class Marked(TextOnly):
        def decode(self, tokens, *, skip_special_tokens=True):
            return "".join(chr(token) for token in tokens if not (skip_special_tokens and token % 2))

    talk = make(Marked())
    talk.line("hello")
    reply = talk.session.text[-12:]
    assert any(token % 2 for token in reply)
    talk.line("why")
    count = len("\n<u>why\n<a>") + 1
    assert f"{count} of {len('<u>hello<a>') + 1 + 12 + count - 1} prompt tokens read" in last(talk)


class TextOnly(Templated):
    """Whatever the model says can be read back: tokens are letters."""

    def decode(self, tokens, *, skip_special_tokens=True):
        return "".join(chr(token) for token in tokens)

    def encode(self, text, **options):
        return [ord(letter) for letter in text]


def test_a_template_that_trims_is_read_anew_from_there(make):
    class Trims(TextOnly):
        def apply_chat_template(self, messages, **options):
            short = [{**message, "content": message["content"][:3]} for message in messages]
            return super().apply_chat_template(short, **options)

    talk = make(Trims())
    talk.line("abc")
    talk.line("def")
    # Kept is what comes before the reply's third letter, whose own place in the head's cache the next one decides.
    new, count = len("3\n<u>def\n<a>"), len("<u>abc\n<a>123\n<u>def\n<a>")
    assert f"{new} of {count} prompt tokens read" in last(talk)


def test_what_goes_wrong_in_a_turn_does_not_end_the_chat(make, monkeypatch):
    class Refuses(TextOnly):
        def apply_chat_template(self, messages, **options):
            if "no" in messages[-1]["content"]:
                raise RuntimeError("roles must alternate")
            return super().apply_chat_template(messages, **options)

    talk = make(Refuses())
    assert talk.line("no")
    assert re.search(r"the chat template refuses the conversation \(roles must alternate\): .*is forgotten", last(talk))
    with monkeypatch.context() as patch:

        def full(*args, **options):
            raise MemoryError("out of memory on a TPU")

        patch.setattr(Session, "stream", full)
        assert talk.line("yes")
        assert last(talk) == "[out of memory on a TPU; this turn is forgotten]\n"
    assert talk.conversation.messages == []
    assert talk.line("hello")
    assert "tau " in last(talk)


def test_commands(make):
    talk = make()
    talk.line("/stats")
    assert "temperature 0; 0 of 400 tokens known" in last(talk)
    talk.line("hello")
    assert "tau " in last(talk) and "tokens/s" in last(talk)
    talk.line("/temp 0.7")
    assert talk.temperature == 0.7 and last(talk) == "[temperature 0.7]\n"
    for wrong in ("/temp", "/temp hot", "/temp -1", "/temp nan", "/temp inf", "/temp 1e-9"):
        talk.line(wrong)
        assert "give a number of at least 0, such as /temp 0.7" in last(talk) and talk.temperature == 0.7
    talk.line("/plain")
    assert last(talk) == "[plain decoding]\n"
    talk.line("again")
    assert "tau 1.00" in last(talk)
    talk.line("/plain")
    assert last(talk) == "[drafting with hass]\n"
    talk.line("/stats")
    text = "".join(talk.written[-3:])
    assert "drafted: 1 replies, 12 tokens" in text and "plain: 1 replies, 12 tokens" in text
    talk.line("/reset")
    assert talk.conversation.messages == [] and talk.session.text == []
    talk.line("/dance")
    assert "unknown command /dance: /reset" in last(talk)
    talk.line("")
    assert not talk.line("/quit")


def test_a_method_that_drafts_nothing_cannot_be_switched(make):
    talk = make()
    plain = chat.Chat(talk.args, talk.target, None, Templated(), talk.written.append)
    plain.line("/plain")
    assert "drafts nothing: there is nothing to switch" in last(talk)


def test_a_reply_takes_the_room_that_there_is(make):
    """To the end of the context, and no further; a shorter one than asked for says so."""
    talk = make(context=60, max_new_tokens=50)
    talk.line("x" * 10)
    room = 60 - len("<u>\n<a>") - 10
    assert last(talk).endswith(f"cut at {room}: the context of 60 is full]\n") and talk.tallies[False].tokens == room
    talk.line("more")
    assert "leave no room for a reply in the session's context of 60: /reset" in last(talk)
    talk.line("/reset")
    talk.line("x")
    assert "tau" in last(talk) and "cut" not in last(talk)  # 50 tokens fit


def test_what_a_command_does_not_take_is_said(make):
    talk = make()
    for wrong in ("/plain off", "/reset now", "/stats all"):
        talk.line(wrong)
        assert f"[{wrong.split()[0]} takes nothing behind it: /reset" in last(talk)
    assert not talk.plain


def test_a_conversation_that_grows_too_long_says_what_to_do(make):
    talk = make(context=40)
    talk.line("x" * 50)
    said = "leave no room for a reply in the session's context of 40: /reset, or start with a larger --context]\n"
    assert last(talk).endswith(said)
    talk.line("x")
    assert "tau" in last(talk)  # and the chat goes on
    assert talk.conversation.messages[0]["content"] == "x"


def test_accepted_drafts_are_green(make):
    talk = make()
    talk.colours = True
    tally = chat.Tally()
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), eagle_jax.StreamChunk([*b"bcd"], 2)]
    assert talk.show(iter(chunks), tally) == [*b"abcd"]
    assert "".join(talk.written) == f"a{viz.GREEN}bc{viz.RESET}d\n"
    assert (tally.passes, tally.tokens, tally.timed) == (1, 4, 0)


@pytest.mark.parametrize("above", [0, 3, 30])
def test_the_last_row_says_tau_and_speed_while_a_reply_runs(make, monkeypatch, above):
    """The text above it is as it would be without, wherever it began; speed is of what is behind the second chunk."""
    talk = make()
    clock = iter((0.0, 10.0, 30.0, *(30.5 + 0.5 * n for n in range(40))))
    monkeypatch.setattr(chat.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 8)))
    screen, bare, seen = Screen(40, 8), Screen(40, 8), []

    def write(text):
        screen.write(text)
        seen.append(screen.lines()[-1])
        if "\x1b" not in text:
            bare.write(text)

    talk.write, talk.watched = write, True
    for number in range(above):
        talk.write(f"earlier {number}\n")
    bcd = eagle_jax.StreamChunk([*b"bc\n"], 2)
    tally = chat.Tally(replies=1)
    talk.show(iter([eagle_jax.StreamChunk([*b"a"], 0), *([bcd] * 12)]), tally)
    assert "tau 3.00, 4 tokens" in seen and "tau 3.00, 6 tokens/s, 37 tokens" in seen
    assert str(tally) == "tau 3.00, 6 tokens/s"
    assert "tau" not in "".join(screen.lines()) and screen.bottom == 7
    said = [line for line in screen.lines() if line]
    assert said and said == [line for line in bare.lines() if line][-len(said) :]
    talk.write("next")
    assert screen.lines()[screen.row] == "next"


def test_a_file_has_no_last_row(make, monkeypatch):
    talk = make()
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), *(eagle_jax.StreamChunk([*b"bcd"], 2) for _ in range(3))]
    talk.show(iter(chunks), chat.Tally())
    assert "".join(talk.written) == "abcdbcdbcd\n"
    monkeypatch.setenv("TERM", "dumb")
    talk.watched = True
    talk.show(iter(chunks), chat.Tally())
    assert "\x1b" not in "".join(talk.written)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_never_ends_the_program(times, make, monkeypatch, capsys):
    """Once it stops the reply; what cannot stop, or has not begun, is interrupted, and the chat goes on without it."""
    typed = iter(["hello", "again"])

    def ask(prompt):
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    talk = make(max_new_tokens=100)
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


def test_ctrl_c_stops_the_reply_and_what_was_said_stays(make):
    talk = make(max_new_tokens=200)
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
    held = chat.stopping(event)
    held.heard(signal.SIGINT, None)
    assert event.is_set()
    with pytest.raises(KeyboardInterrupt):
        held.heard(signal.SIGINT, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "eagle9"], "unknown method 'eagle9'"),
        (["--temperature", "-1"], "--temperature -1.0 must not be negative"),
        (["--temperature", "1", "--top-p", "2"], "top_p=2.0 must lie in (0, 1]"),
        (["--context", "1"], "--context 1: context=1 must be an integer from 2 to the target's 2048 positions"),
        (["--chat-template", "/nope.jinja"], "--chat-template /nope.jinja: no chat template at /nope.jinja"),
        (["--target", "/nope", "--method", "pld"], "--target /nope"),
        (["--target", "/nope"], "--target /nope needs what drafts for it: its head with --eagle3 PATH --method eagle3"),
        (["--eagle3", "/nope"], "--eagle3 is given, and --method hass has no use for it: add --method eagle3"),
        (["--seed", "4294967296"], "--seed 4294967296 must be below 2**32"),
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
