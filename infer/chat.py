"""Runs a chat in the terminal: accepted drafts are green, and the caches are kept between turns.

    python -m infer.chat                                       # the bundled pair, which answers with nonsense
    python -m infer.chat --target Qwen/Qwen3-1.7B --eagle3 AngelSlim/Qwen3-1.7B_eagle3 --dtype bfloat16

Ctrl-C stops a reply and keeps its text so far; Ctrl-D or /quit ends the chat. A row below the reply shows tau and
speed while it runs. After it a line also gives the prompt tokens that were read: those that are new since the last
reply. If a template rewrites earlier turns (Qwen3's drops thoughts), the text is read again from the first change.
Commands: /reset forgets the conversation, /temp 0.7 sets the temperature, /plain switches drafting off and on (the
drafter then reads what it missed), /stats sums up, /help lists these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import jax
from rich.console import Console

from eagle_jax.core.sampling import make_sampling
from eagle_jax.data.chat.decode import TextStream
from eagle_jax.data.chat.tokenize import chat_text, encode_chat
from eagle_jax.data.templates.render import chat_template
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.runtime.session import Session
from eagle_jax.viz import DIM, GREEN, paint
from infer.common.interrupts import interrupt, mark_handled
from infer.common.labels import PLAIN, Label
from infer.common.methods import OPTIONS, Loader, Places, Sources, check_methods, load_pair
from infer.common.programs import at_least_one, check_seed, naming, not_negative, run
from infer.common.status_line import StatusLine

SHORTEST = 16
"""Tokens that a reply must have room for; with less room the conversation is too long."""
HELP = "/reset  /temp NUMBER  /plain  /stats  /help  /quit; Ctrl-C stops a reply"


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Arguments of the chat.

    Attributes:
      method: as in infer.bench: hass, eagle3@6x10x59, pld, vanilla, ...; None is the method of the given head, and hass
        without one.
      system: system message.
      max_new_tokens: longest reply.
      context: most tokens of the whole conversation; None is what the target has, at most 4096.
      temperature: 0 is greedy.
      top_k: keep the k largest logits; 0 switches it off.
      top_p: keep the likeliest tokens with this probability together.
      seed: of sampled replies.
      dtype: of all weights.
    """

    method: str | None = None
    system: str | None = None
    max_new_tokens: int = 256
    context: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: str = "float32"


@dataclasses.dataclass
class Tally:
    """Tokens, passes and time of replies.

    Attributes:
      tokens: all of them. passes: of the target, after each reply's first token.
      timed, seconds: tokens and time after each reply's second chunk: the first two read the prompt and compile.
    """

    replies: int = 0
    tokens: int = 0
    passes: int = 0
    timed: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        behind = self.tokens - self.replies
        tau = f"tau {behind / self.passes:.2f}" if self.passes else "tau -"
        return f"{tau}, {self.timed / self.seconds:.0f} tokens/s" if self.timed else tau

    def add(self, other: Tally) -> None:
        """Adds another reply."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


class Conversation:
    """The token ids of a conversation: emitted tokens stay as they are, and the cache stays valid.

    If the template's text continues the text so far, only the rest is encoded; otherwise (a template that trims replies
    or drops thoughts) the whole text is.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self.tokenizer = tokenizer
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []
        self._text = ""

    def ask(self, content: str) -> list[int]:
        """Returns the prompt with a new message of the user."""
        text = chat_text(self.tokenizer, [*self.messages, {"role": "user", "content": content}])
        if self._ids and text.startswith(self._text):
            new = self.tokenizer.encode(text[len(self._text) :], add_special_tokens=False, verbose=False)
            ids = [*self._ids, *new]
            if self._decode(ids) == text:
                return ids
        return encode_chat(self.tokenizer, text)

    def heard(self, content: str, prompt: Sequence[int], reply: Sequence[int], stops: Sequence[int]) -> None:
        """Appends a message and its reply, without the stop token, which the template writes.

        Other special tokens of the reply stay: without them every later turn would be read again.
        """
        said = list(reply[:-1] if reply and reply[-1] in stops else reply)
        answer = self._decode(said)
        self.messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        self._ids = [*prompt, *said]
        self._text = self._decode(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class Chat:
    """Holds a chat and carries out its lines."""

    def __init__(
        self,
        args: Args,
        target: Any,
        drafter: Any,
        tokenizer: Any,
        write: Callable[[str], Any],
        console: Console | None = None,
    ) -> None:
        self.args, self.target, self.drafter, self.tokenizer = args, target, drafter, tokenizer
        self.write, self.console = write, console
        self.colours = (sys.stdout.isatty() or "FORCE_COLOR" in os.environ) and "NO_COLOR" not in os.environ
        self.temperature, self.plain, self.turn = args.temperature, drafter is None, 0
        self.tallies = {True: Tally(), False: Tally()}
        self.stopped = threading.Event()
        self.asking = False
        self.reset()

    def reset(self) -> None:
        """Forgets the conversation."""
        self.conversation = Conversation(self.tokenizer, self.args.system)
        self.session = Session(self.target, self.drafter, context=self.args.context)

    def line(self, text: str) -> bool:
        """Carries out what the user typed; False ends the chat."""
        text = text.strip()
        if text.startswith("/"):
            return self.command(text)
        if text:
            try:
                self.reply(text)
            except (ValueError, MemoryError) as error:  # the template raises, or the device is full: the chat continues
                self.asking = False
                self.say(f"{error}; this turn is forgotten")
        return True

    def command(self, text: str) -> bool:
        """Carries out a command; False ends the chat."""
        name, _, rest = text.partition(" ")
        if name in ("/quit", "/exit"):
            return False
        if rest and name in ("/reset", "/plain", "/stats"):
            self.say(f"{name} takes nothing behind it: {HELP}")
            return True
        if name == "/reset":
            self.reset()
            self.say("forgotten")
        elif name == "/temp":
            self.set_temperature(rest)
        elif name == "/plain":
            self.switch()
        elif name == "/stats":
            for plain, words in ((False, "drafted"), (True, "plain")):
                tally = self.tallies[plain]
                if tally.replies:
                    replies = "1 reply" if tally.replies == 1 else f"{tally.replies} replies"
                    self.say(f"{words}: {replies}, {tally.tokens} tokens, {tally}")
            known = f"{len(self.session.text)} of {self.session.context} tokens known"
            self.say(f"temperature {self.temperature:g}; {known}")
        else:
            self.say(HELP if name == "/help" else f"unknown command {name}: {HELP}")
        return True

    def set_temperature(self, text: str) -> None:
        """Sets the temperature of later replies."""
        try:
            value = float(text)
        except ValueError:
            self.say(f"/temp takes a number of at least 0, such as /temp 0.7; 0 is greedy; it is {self.temperature:g}")
            return
        try:
            make_sampling(value)
        except ValueError as error:
            self.say(f"/temp {text}: {error}")
            return
        self.temperature = value
        self.say(f"temperature {value:g}")

    def switch(self) -> None:
        """Switches drafting off or on; the conversation continues."""
        if self.drafter is None:
            self.say(f"--method {self.args.method} drafts nothing: there is nothing to switch")
            return
        self.plain = not self.plain
        self.say("plain decoding" if self.plain else f"drafting with {self.args.method}")

    def reply(self, content: str) -> None:
        """Sends a message and shows the reply as it comes."""
        prompt = self.conversation.ask(content)
        self.turn += 1
        key = jax.random.fold_in(jax.random.key(self.args.seed), self.turn)
        longest = min(self.args.max_new_tokens, self.session.context - len(prompt))
        if longest < min(self.args.max_new_tokens, SHORTEST):
            self.say(
                f"{len(prompt)} tokens leave no room for a reply in the session's context of {self.session.context}: "
                "/reset, or start with a larger --context"
            )
            return
        chunks = self.session.stream(
            prompt, max_new_tokens=longest, temperature=self.temperature,
            top_k=self.args.top_k, top_p=self.args.top_p, key=key, plain=self.plain,
        )  # fmt: skip
        self.stopped.clear()
        self.asking = True
        tally, reply = Tally(replies=1), list[int]()
        with stopping(self.stopped):
            reply = self.show(chunks, tally)
        self.tallies[self.plain].add(tally)
        self.conversation.heard(content, prompt, reply, self.target.config.eos_ids)
        self.asking = False
        cut = ", stopped" if self.stopped.is_set() else ""
        if tally.tokens == longest and reply[-1] not in self.target.config.eos_ids:
            full = f"the context of {self.session.context} is full"
            cut += f", cut at {longest}: {full if longest < self.args.max_new_tokens else '--max-new-tokens'}"
        self.say(f"{tally}, {self.session.read} of {len(prompt)} prompt tokens read{cut}")

    def show(self, chunks: Iterator[Any], tally: Tally) -> list[int]:
        """Writes tokens as they come, accepted drafts in green; returns them and adds what they took to `tally`."""
        if self.console is None:
            return self._stream(chunks, tally, self._paint, lambda status: None)
        with StatusLine(self.console) as row:
            row.show("reading the prompt; the first reply with new settings compiles first")
            return self._stream(chunks, tally, row.write, row.show)

    def _paint(self, text: str, style: str = "") -> None:
        self.write(paint(text, GREEN, self.colours) if style else text)

    def _stream(
        self, chunks: Iterator[Any], tally: Tally, write: Callable[..., None], show: Callable[[str], None]
    ) -> list[int]:
        text, reply, before = TextStream(self.tokenizer), list[int](), time.perf_counter()
        for number, chunk in enumerate(chunks):
            now = time.perf_counter()
            reply += chunk.tokens
            write(text.push(chunk.tokens[: chunk.drafted]), "green")
            write(text.push(chunk.tokens[chunk.drafted :]))
            tally.tokens += len(chunk.tokens)
            tally.passes += number > 0  # the first chunk belongs to the prompt's pass
            if number > 1:
                tally.timed, tally.seconds = tally.timed + len(chunk.tokens), tally.seconds + now - before
            if number > 0:
                show(f"{tally}, {tally.tokens} tokens")
            before = now
            if self.stopped.is_set():
                break
        write(text.end() if self.console else text.end() + "\n")
        return reply

    def say(self, words: str) -> None:
        """Writes a line of the program itself."""
        self.write(paint(f"[{words}]", DIM, self.colours) + "\n")


@contextlib.contextmanager
def stopping(event: threading.Event) -> Iterator[None]:
    """Lets the first Ctrl-C set `event`, so that no program is interrupted halfway; a second one interrupts."""

    def handle(number: int, frame: FrameType | None) -> None:
        if event.is_set():
            interrupt(number, frame)
        mark_handled()
        event.set()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def method_of(args: Args) -> str:
    """Returns the method that the arguments name, or that of the given head.

    Raises:
      ValueError: no method, several possible ones, or a head that the method does not use.
    """
    given = [name for name, option in OPTIONS.items() if getattr(args, option) is not None]
    if args.method is None:
        if len(given) > 1:
            raise ValueError(f"heads of {' and '.join(given)} are given: say which one drafts, as --method {given[0]}")
        if not given and args.target is not None:
            raise ValueError(
                f"--target {args.target} says what answers, and nothing what drafts: give its head, as --eagle3 PATH, "
                "or --method pld, which needs none, or --method vanilla for plain decoding"
            )
        return given[0] if given else "hass"
    own = Label.parse(args.method).method
    if idle := [name for name in given if name != own]:
        option = f"--{OPTIONS[idle[0]].replace('_', '-')}"
        raise ValueError(f"{option} is given, and --method {args.method} has no use for it: add --method {idle[0]}")
    return args.method


def main(args: Args) -> None:
    """Runs the chat until the input ends."""
    at_least_one(args, "max_new_tokens")
    not_negative(args, "temperature", "top_k")
    check_seed(args)
    make_sampling(args.temperature, args.top_k, args.top_p)  # refuses what is no law, naming it
    method = method_of(args)
    args = dataclasses.replace(args, method=method)
    sources = Sources.of(args, args.dtype)
    labels = [label for label in check_methods([method], sources) if label != PLAIN]
    use_compilation_cache()
    target, tokenizer = load_pair(sources)
    drafter = Loader(target, sources)(labels[0]) if labels else None
    if chat_template(tokenizer) is None:
        print("warning: the tokenizer has no chat template, turns are joined by blank lines; give --chat-template",
              file=sys.stderr)  # fmt: skip
    if args.context is not None:
        with naming("--context", args.context):
            Session(target, drafter, context=args.context)
        if args.context < (least := 2 * SHORTEST):
            raise ValueError(f"--context {args.context} leaves no room for question and reply: give {least} or more")
    console = Console()
    watched = console if sys.stdout.isatty() and not console.is_dumb_terminal else None
    chat = Chat(args, target, drafter, tokenizer, lambda text: print(text, end="", flush=True), watched)
    name = args.target or "the bundled pair"
    print(f"{name}, {args.method}. {HELP}. The first reply compiles.")
    if sys.stdin.isatty():
        import readline  # noqa: F401 (gives `input` a history)
    while True:
        try:
            if not chat.line(input("> ")):
                break
        except EOFError:
            print()
            break
        except KeyboardInterrupt:  # at the prompt; or in a turn before its reply began, or twice
            print()
            chat.say("interrupted: this turn is forgotten" if chat.asking else "Ctrl-D or /quit ends the chat")
            chat.asking = False


if __name__ == "__main__":
    run(main, Args, __doc__)
