"""The chat: what its lines do, and that the text is what the target says to the whole conversation."""

from __future__ import annotations

import io
import re

import jax
import pyte
import pytest
from rich.console import Console

import eagle_jax
from eagle_jax import viz
from eagle_jax.runtime.session import Session
from infer import chat
from infer.common.status_line import StatusLine
from tests.infer.chats import Templated, TextOnly, last


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_reply_is_the_targets_own_to_the_whole_conversation(make_chat, pair, temperature, monkeypatch):
    asked = []
    real = Session.stream

    def watched(session, prompt, **options):
        asked.append(prompt)
        return real(session, prompt, **options)

    monkeypatch.setattr(Session, "stream", watched)
    talk = make_chat(temperature=temperature, seed=5, system="be brief")
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


def test_only_what_is_new_is_read(make_chat):
    talk = make_chat(TextOnly())
    talk.line("hello")
    first, new = len("<u>hello\n<a>"), len("\n<u>why\n<a>")
    assert f"{first} of {first} prompt tokens read" in last(talk)
    talk.line("why")  # the last token of the reply is in no cache yet
    assert f"{new + 1} of {first + 12 + new} prompt tokens read" in last(talk)


def test_plain_replies_go_on_from_the_same_cache(make_chat):
    """The target reads what is new; the drafter, wanted again, what was said since."""
    talk = make_chat(TextOnly())
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


def test_special_tokens_in_a_reply_stay_in_the_text(make_chat):
    """A model that begins a turn of its own, as small ones do: what follows is still only what is new."""

    class Marked(TextOnly):
        def decode(self, tokens, *, skip_special_tokens=True):
            return "".join(chr(token) for token in tokens if not (skip_special_tokens and token % 2))

    talk = make_chat(Marked())
    talk.line("hello")
    reply = talk.session.text[-12:]
    assert any(token % 2 for token in reply)
    talk.line("why")
    count = len("\n<u>why\n<a>") + 1
    assert f"{count} of {len('<u>hello<a>') + 1 + 12 + count - 1} prompt tokens read" in last(talk)


def test_a_template_that_trims_is_read_anew_from_there(make_chat):
    class Trims(TextOnly):
        def apply_chat_template(self, messages, **options):
            short = [{**message, "content": message["content"][:3]} for message in messages]
            return super().apply_chat_template(short, **options)

    talk = make_chat(Trims())
    talk.line("abc")
    talk.line("def")
    # Kept is what comes before the reply's third letter, whose own place in the head's cache the next one decides.
    new, count = len("3\n<u>def\n<a>"), len("<u>abc\n<a>123\n<u>def\n<a>")
    assert f"{new} of {count} prompt tokens read" in last(talk)


def test_what_goes_wrong_in_a_turn_does_not_end_the_chat(make_chat, monkeypatch):
    class Refuses(TextOnly):
        def apply_chat_template(self, messages, **options):
            if "no" in messages[-1]["content"]:
                raise RuntimeError("roles must alternate")
            return super().apply_chat_template(messages, **options)

    talk = make_chat(Refuses())
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


def test_commands(make_chat):
    talk = make_chat()
    talk.line("/stats")
    assert "temperature 0; 0 of 400 tokens known" in last(talk)
    talk.line("hello")
    assert "tau " in last(talk) and "tokens/s" in last(talk)
    talk.line("/temp 0.7")
    assert talk.temperature == 0.7 and last(talk) == "[temperature 0.7]\n"
    for wrong, why in (
        ("/temp", "/temp takes a number of at least 0, such as /temp 0.7; 0 is greedy; it is 0.7"),
        ("/temp hot", "/temp takes a number"),
        ("/temp -1", "must be a finite number of at least 0"),
        ("/temp nan", "must be a finite number"),
        ("/temp 1e-9", "must be 0 (greedy decoding) or lie in 1e-06 to 1e+38"),
    ):
        talk.line(wrong)
        assert why in last(talk) and talk.temperature == 0.7
    talk.line("/plain")
    assert last(talk) == "[plain decoding]\n"
    talk.line("again")
    assert "tau 1.00" in last(talk)
    talk.line("/plain")
    assert last(talk) == "[drafting with hass]\n"
    talk.line("/stats")
    text = "".join(talk.written[-3:])
    assert "drafted: 1 reply, 12 tokens" in text and "plain: 1 reply, 12 tokens" in text
    talk.line("/reset")
    assert talk.conversation.messages == [] and talk.session.text == []
    talk.line("/dance")
    assert "unknown command /dance: /reset" in last(talk)
    talk.line("")
    assert not talk.line("/quit")


def test_a_method_that_drafts_nothing_cannot_be_switched(make_chat):
    talk = make_chat()
    plain = chat.Chat(talk.args, talk.target, None, Templated(), talk.written.append)
    plain.line("/plain")
    assert "drafts nothing: there is nothing to switch" in last(talk)


def test_a_reply_that_is_cut_says_so(make_chat):
    talk = make_chat(max_new_tokens=3)
    talk.line("more")
    assert last(talk).endswith(", cut at 3: --max-new-tokens]\n") and talk.tallies[False].tokens == 3


def test_a_reply_takes_the_room_that_there_is(make_chat):
    """To the end of the context, and no further; a shorter one than asked for says so."""
    talk = make_chat(context=60, max_new_tokens=50)
    talk.line("x" * 10)
    room = 60 - len("<u>\n<a>") - 10
    assert last(talk).endswith(f"cut at {room}: the context of 60 is full]\n") and talk.tallies[False].tokens == room
    talk.line("more")
    assert "leave no room for a reply in the session's context of 60: /reset" in last(talk)
    talk.line("/reset")
    talk.line("x")
    assert "tau" in last(talk) and "context" not in last(talk)  # 50 tokens fit


def test_what_a_command_does_not_take_is_said(make_chat):
    talk = make_chat()
    for wrong in ("/plain off", "/reset now", "/stats all"):
        talk.line(wrong)
        assert f"[{wrong.split()[0]} takes nothing behind it: /reset" in last(talk)
    assert not talk.plain


def test_a_conversation_that_grows_too_long_says_what_to_do(make_chat):
    talk = make_chat(context=40)
    talk.line("x" * 50)
    said = "leave no room for a reply in the session's context of 40: /reset, or start with a larger --context]\n"
    assert last(talk).endswith(said)
    talk.line("x")
    assert "tau" in last(talk)  # and the chat goes on
    assert talk.conversation.messages[0]["content"] == "x"


def test_accepted_drafts_are_green(make_chat):
    talk = make_chat()
    talk.colours = True
    tally = chat.Tally()
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), eagle_jax.StreamChunk([*b"bcd"], 2)]
    assert talk.show(iter(chunks), tally) == [*b"abcd"]
    assert "".join(talk.written) == f"a{viz.GREEN}bc{viz.RESET}d\n"
    assert (tally.passes, tally.tokens, tally.timed) == (1, 4, 0)


@pytest.mark.parametrize("above", [0, 3, 30])
def test_the_last_row_says_tau_and_speed_while_a_reply_runs(make_chat, monkeypatch, above):
    """The text is as it would be without, wherever it began; speed is of what is behind the second chunk."""
    talk = make_chat()
    clock = iter((0.0, 10.0, 30.0, *(30.5 + 0.5 * n for n in range(40))))
    monkeypatch.setattr(chat.time, "perf_counter", lambda: next(clock))
    screen = pyte.HistoryScreen(40, 8, history=200)
    screen.set_mode(pyte.modes.LNM)
    terminal, statuses = pyte.Stream(screen), set()

    class Terminal(io.StringIO):
        def write(self, text):
            terminal.feed(text)
            statuses.update(line.strip() for line in screen.display)
            return len(text)

    monkeypatch.setenv("TERM", "xterm")
    talk.console = Console(file=Terminal(), force_terminal=True, width=40, height=8, get_time=lambda: 0.0)
    for number in range(above):
        talk.console.print(f"earlier {number}")
    bcd = eagle_jax.StreamChunk([*b"bc\n"], 2)
    tally = chat.Tally(replies=1)
    talk.show(iter([eagle_jax.StreamChunk([*b"a"], 0), *([bcd] * 12)]), tally)
    assert any(line.startswith("reading the prompt; the first reply") for line in statuses)
    assert {"tau 3.00, 4 tokens", "tau 3.00, 6 tokens/s, 37 tokens"} <= statuses
    assert str(tally) == "tau 3.00, 6 tokens/s"
    shown = ["".join(row[column].data for column in range(40)).strip() for row in screen.history.top]
    shown += [line.strip() for line in screen.display]
    assert [line for line in shown if line] == [*(f"earlier {n}" for n in range(above)), "abc", *["bc"] * 11]


def test_long_rows_are_wrapped_at_words():
    file = io.StringIO()
    with StatusLine(Console(file=file, force_terminal=True, width=12, height=8)) as row:
        for word in ("one ", "two ", "three ", "four"):
            row.write(word)
            row.show("tau 3")
    assert "one two" in file.getvalue() and "three four" in file.getvalue()


def test_a_file_has_no_last_row(make_chat):
    talk = make_chat()
    chunks = [eagle_jax.StreamChunk([*b"a"], 0), *(eagle_jax.StreamChunk([*b"bcd"], 2) for _ in range(3))]
    talk.show(iter(chunks), chat.Tally())
    assert "".join(talk.written) == "abcdbcdbcd\n"
