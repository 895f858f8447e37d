"""Checks the chat: commands, replies against `generate`, Ctrl-C and errors."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path

import jax
import pyte
import pytest
from rich.console import Console

import eagle_jax
from eagle_jax.data.chat import with_stop_ids
from eagle_jax.runtime.session import Session
from infer import chat
from infer.common.programs import arguments
from infer.common.terminal import ReplyView
from tests.programs.conftest import ByteTokenizer


class Templated(ByteTokenizer):
    """Writes marks before turns, as chat templates do."""

    chat_template = "marks"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        marks = {"system": "<s>", "user": "<u>", "assistant": "<a>"}
        text = "".join(marks[message["role"]] + message["content"] + "\n" for message in messages)
        return text + "<a>" * add_generation_prompt


class TextOnly(Templated):
    """Has letters as tokens, so that the text of a reply encodes to the same tokens."""

    def decode(self, tokens, *, skip_special_tokens=True):
        return "".join(chr(token) for token in tokens)

    def encode(self, text, **options):
        return [ord(letter) for letter in text]


@pytest.fixture
def make_chat(pair):
    def make(tokenizer=None, **options):
        args = chat.Args(**{"method": "hass", "max_new_tokens": 12, "context": 400} | options)
        drafter = None if args.method == "vanilla" else eagle_jax.load_demo("hass")[1]
        return chat.Chat(args, pair, drafter, tokenizer or Templated(), Console(file=io.StringIO(), width=200))

    return make


def said(talk, line: str) -> str:
    """Types a line and returns the last line of the output."""
    assert talk.line(line)
    return talk.console.file.getvalue().rstrip("\n").rpartition("\n")[2]


def test_every_reply_equals_plain_decoding_of_the_whole_conversation(make_chat, pair, monkeypatch):
    prompts, texts = [], []
    real = Session.stream

    def spy(session, prompt, **options):
        prompts.append(prompt)
        return real(session, prompt, **options)

    monkeypatch.setattr(Session, "stream", spy)
    talk = make_chat(temperature=0.9, seed=5, system="be brief")
    messages = [{"role": "system", "content": "be brief"}]
    for line in ("hello", "and?"):
        messages.append({"role": "user", "content": line})
        talk.line(line)
        texts.append(talk.session.text)
        text = Templated().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert Templated().decode(prompts[-1]) == text
        messages.append({"role": "assistant", "content": Templated().decode(texts[-1][len(prompts[-1]) :])})
        assert talk.conversation.messages == messages
    fold_in = jax.random.fold_in
    # `generate` folds row index 0 into a single key.
    keys = [fold_in(fold_in(jax.random.key(5), turn), 0) for turn in (1, 2)]
    expected = eagle_jax.generate(pair, None, prompts, max_new_tokens=12, temperature=0.9, key=jax.numpy.stack(keys))
    assert texts == [[*prompt, *reply] for prompt, reply in zip(prompts, expected.tokens, strict=True)]


@pytest.mark.slow
def test_a_turn_prefills_new_tokens_only(make_chat):
    """After plain replies the drafter also reads the replies that it missed."""
    talk = make_chat(TextOnly())
    first, new = len("<u>hello\n<a>"), len("\n<u>why\n<a>")
    assert f"prefilled {first} of {first} prompt tokens" in said(talk, "hello")
    # The last token of a reply is in no cache yet.
    assert f"prefilled {new + 1} of {first + 12 + new} prompt tokens" in said(talk, "why")
    assert said(talk, "/plain") == "[plain decoding]"
    assert re.search(rf"tau 1\.00, .*, prefilled {new + 1} of ", said(talk, "why"))
    assert said(talk, "/plain") == "[drafting with hass]"
    assert f", prefilled {2 * (new + 1) + 12 - 1} of " in said(talk, "why")


class Trims(TextOnly):
    """Cuts every message to three letters, as templates that drop thoughts rewrite earlier turns."""

    def apply_chat_template(self, messages, **options):
        short = [{**message, "content": message["content"][:3]} for message in messages]
        return super().apply_chat_template(short, **options)


def test_a_changed_text_is_prefilled_from_the_change(make_chat):
    """The template cuts replies to three letters, so the cache is stale from there."""
    talk = make_chat(Trims())
    talk.line("abc")
    new, count = len("3\n<u>def\n<a>"), len("<u>abc\n<a>123\n<u>def\n<a>")
    assert f"prefilled {new} of {count} prompt tokens" in said(talk, "def")


def test_an_error_in_a_turn_does_not_end_the_chat(make_chat, monkeypatch):
    class Strict(TextOnly):
        def apply_chat_template(self, messages, **options):
            if "no" in messages[-1]["content"]:
                raise RuntimeError("roles must alternate")
            return super().apply_chat_template(messages, **options)

    def full(*args, **options):
        raise MemoryError("out of memory on a TPU")

    talk = make_chat(Strict(), method="vanilla", context=60, max_new_tokens=50)
    assert re.search(r"roles must alternate.*; this turn was dropped", said(talk, "no"))
    assert "--context must leave room for a reply, got 60 for 67 tokens so far. Type /reset" in said(talk, "x" * 60)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "stream", full)
        assert said(talk, "yes") == "[out of memory on a TPU; this turn was dropped]"
    assert talk.conversation.messages == []
    assert said(talk, "x" * 10).endswith(", cut: the context is full]")
    assert "must leave room" in said(talk, "more")
    talk.line("/reset")
    assert said(talk, "x").endswith("prompt tokens, cut at --max-new-tokens]")


def test_commands_answer_with_a_message(make_chat):
    talk = make_chat()
    wrong = r"/temp must be a number of at least 0, got '{}'\. Type /temp 0\.7\.\]$"
    for line, words in (
        ("/stats", r"temperature 0; context: 0 of 400 tokens\]"),
        ("hello", r"tau \d\.\d\d, \d+ tokens/s, prefilled 12 of 12 prompt tokens"),
        ("/temp 0.7", r"^\[temperature 0\.7\]$"),
        ("/temp hot", wrong.format("hot")),
        ("/temp nan", wrong.format("nan")),
        ("/plain off", "unknown command /plain off: /reset"),
        ("/plain", "plain decoding"),
        ("again", r"tau 1\.00"),
        ("/stats", r"temperature 0\.7; .*; drafted: replies 1, tokens 12, .*; plain: replies 1, tokens 12, tau 1\.00"),
        ("/reset", "forgotten"),
        ("/help", "/quit; Ctrl-C"),
    ):
        assert re.search(words, said(talk, line)), line
    assert talk.conversation.messages == [] and talk.session.text == [] and talk.temperature == 0.7
    assert talk.line("")
    assert not talk.line("/quit")
    assert "has no drafter: /plain has no effect" in said(make_chat(method="vanilla"), "/plain")


CHUNKS = [eagle_jax.StreamChunk([*b"a"], 0), *[eagle_jax.StreamChunk([*b"bc\n"], 2)] * 12]


def test_accepted_drafts_are_green():
    colours = {"force_terminal": True, "color_system": "standard"}
    for options, text in (({}, "abc\nbc\n\n"), (colours, "a\x1b[32mbc\x1b[0m\n\x1b[32mbc\x1b[0m\n\n")):
        console = Console(file=io.StringIO(), force_interactive=False, **options)
        with ReplyView(console, ByteTokenizer()) as view:
            view.show("no status outside a terminal")
            for chunk in CHUNKS[:3]:
                view.push(chunk)
        assert console.file.getvalue() == text


@pytest.mark.parametrize("above", [3, 30])
def test_the_last_row_shows_tau_and_speed_while_a_reply_runs(make_chat, monkeypatch, above):
    """The row does not change the text. Speed counts from the third chunk."""
    talk = make_chat()
    clock = iter((10, 30, *(30.5 + 0.5 * n for n in range(40))))
    monkeypatch.setattr(chat.time, "perf_counter_ns", lambda: int(next(clock) * 1e9))
    monkeypatch.setenv("TERM", "xterm")
    screen = pyte.HistoryScreen(40, 8, history=200)
    screen.set_mode(pyte.modes.LNM)
    terminal, statuses = pyte.Stream(screen), set()

    class Terminal(io.StringIO):
        def write(self, text):
            terminal.feed(text)
            statuses.update(line.strip() for line in screen.display)
            return len(text)

    talk.console = Console(file=Terminal(), force_terminal=True, width=40, height=8, get_time=lambda: 0.0)
    for number in range(above):
        talk.console.print(f"earlier {number}")
    talk.session.stream = lambda *args, **options: iter(CHUNKS)
    talk.line("x")
    assert any(line.startswith("reading the prompt; the first reply") for line in statuses)
    assert {"tau 3.00, 4 tokens", "tau 3.00, 6 tokens/s, 37 tokens"} <= statuses
    rows = ["".join(row[column].data for column in range(40)).strip() for row in screen.history.top]
    rows = [line for line in [*rows, *(line.strip() for line in screen.display)] if line]
    assert rows[:-2] == [*(f"earlier {n}" for n in range(above)), "abc", *["bc"] * 11]
    assert rows[-2].startswith("[tau 3.00, 6 tokens/s, ")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_never_ends_the_chat(times, pair, monkeypatch, capsys):
    """One Ctrl-C stops the reply and keeps its text, two drop the turn. At the prompt a hint is printed."""
    lines = iter(["hello", KeyboardInterrupt(), "again", EOFError()])
    talks, real = [], Session.stream

    def type_line(prompt):
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    def interrupted(session, prompt, **options):
        first = not talks
        talks.append(session)
        for number, chunk in enumerate(real(session, prompt, **options)):
            for _ in range(times if first and number == 3 else 0):
                signal.raise_signal(signal.SIGINT)
            yield chunk

    monkeypatch.setattr(Session, "stream", interrupted)
    monkeypatch.setattr(chat, "load_pair", lambda sources: (pair, Templated()))
    monkeypatch.setattr("builtins.input", type_line)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat.main(chat.Args(method="vanilla", max_new_tokens=100))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    out = capsys.readouterr().out
    assert out.startswith("the bundled pair with vanilla. The first reply compiles.\n/reset  /temp NUMBER")
    assert "[Ctrl-D or /quit ends the chat]" in out
    assert ("prompt tokens, stopped]" in out) == (times == 1)
    assert ("[interrupted: this turn was dropped]" in out) == (times == 2)
    assert Templated().decode(talks[-1].text).count("<u>") == (2 if times == 1 else 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--method eagle9", "got 'eagle9'"),
        ("--top-p 2", "top_p"),
        ("--max-new-tokens 0", "--max-new-tokens must be at least 1, got 0"),
        ("--seed 4294967296", "--seed must be from 0 to 2**32 - 1, got 4294967296"),
        ("--context 1", "--context 1: context must be an integer from 2 to the target's"),
        ("--target /nope", "--method must name the drafter, got only --target. Give one head, as --eagle3 PATH, or"),
        ("--eagle3 /nope --hydra /no", "--method must name the drafter, got hydra and eagle3"),
        ("--eagle3 /nope --method pld", "--eagle3 must belong to --method pld, got another method's. Leave it out, or"),
    ],
)
def test_a_bad_option_is_an_error_of_one_line(options, message, pair, monkeypatch):
    monkeypatch.setattr(chat, "load_pair", lambda sources: (pair, Templated()))
    with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
        chat.main(arguments(chat.Args, None, options.split()))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "method"),
    [("", "eagle3"), ("--method pld", "pld"), ("--method vanilla", "vanilla"), ("--eagle2 HEAD", "eagle2"),
     ("--method lookahead", "lookahead"), ("--eagle3 HEAD", "eagle3")],
)  # fmt: skip
def test_every_method_chats_with_smollm2(options, method, monkeypatch):
    """The pair's own head counts as given only where nothing else is."""
    monkeypatch.setattr("infer.common.methods.smollm2_target", lambda: Path("target.gguf"))
    args = arguments(chat.Args, None, ["--pair", "smollm2", *options.split()])
    assert chat.method_of(args) == method


@pytest.mark.slow
def test_a_conversation_with_a_chat_model_makes_sense():
    """The second reply needs the first turn, and both are those of plain decoding of the whole conversation."""
    target, drafter, tokenizer = load_smollm2()
    args = chat.Args(pair="smollm2", method="eagle3", max_new_tokens=32, context=400)
    talk = chat.Chat(args, target, drafter, tokenizer, Console(file=io.StringIO(), width=200))
    messages = []
    for line in ("What is the capital of France?", "What language do people speak there?"):
        messages.append({"role": "user", "content": line})
        talk.line(line)
        prompt = eagle_jax.chat_ids(tokenizer, messages)
        plain = eagle_jax.generate(target, None, [prompt], max_new_tokens=32).tokens[0]
        assert talk.session.text[: len(prompt) + len(plain)] == [*prompt, *plain]
        messages.append({"role": "assistant", "content": tokenizer.decode(plain, skip_special_tokens=True)})
    assert "Paris" in messages[1]["content"] and "French" in messages[3]["content"]


def load_smollm2():
    try:
        target, drafter, tokenizer = eagle_jax.load_demo("smollm2")
    except ValueError as error:
        pytest.skip(str(error))
    return with_stop_ids(target, tokenizer), drafter, tokenizer
