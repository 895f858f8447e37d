"""Runs a chat in the terminal: accepted drafts are green, and the caches are kept between turns.

    python -m infer.chat                                       # the bundled pair, which answers with nonsense
    python -m infer.chat --pair smollm2                        # SmolLM2-135M-Instruct, after `make smollm`
    python -m infer.chat --target Qwen/Qwen3-1.7B --eagle3 AngelSlim/Qwen3-1.7B_eagle3 --dtype bfloat16

Ctrl-C stops a reply and keeps its text so far; Ctrl-D or /quit ends the chat. A row below the reply shows tau and
speed. The line after a reply also counts the prefilled prompt tokens, those after the cached text. If a template
rewrites earlier turns (Qwen3's drops thoughts), the prefill begins at the first change.
Commands: /reset forgets the conversation, /temp 0.7 sets the temperature, /plain switches drafting off and on (the
drafter then reads what it missed), /stats sums up, /help lists these.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from eagle_jax.core.sampling import make_sampling
from eagle_jax.data.chat import chat_template, chat_text, encode_chat
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.runtime.session import Session
from infer.common.interrupts import stop_event
from infer.common.methods import Loader, Places, check_methods, load_pair, method_of
from infer.common.programs import at_least_one, check_seed, naming, run
from infer.common.terminal import ReplyView, stdout_console

SHORTEST = 16
"""Least room for a reply, in tokens."""
HELP = "/reset  /temp NUMBER  /plain  /stats  /help  /quit; Ctrl-C stops a reply"


@dataclasses.dataclass(frozen=True)
class Args(Places):
    """Options of the chat."""

    # as in infer.bench: hass, eagle3@6x10x59, pld, vanilla, ...; None is the method of the given head, else hass
    method: str | None = None
    system: str | None = None  # system message
    max_new_tokens: int = 256  # longest reply
    # most tokens of the whole conversation; None is the target's number of positions, at most 4096
    context: int | None = None
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # keep the k largest logits; 0 switches it off
    top_p: float = 1.0  # keep the likeliest tokens with this probability together
    seed: int = 0  # of sampled replies


def summary(tally: Counter[str]) -> str:
    """Returns tau, and the speed from the third chunk on.

    The first chunk reads the prompt. `step` compiles at its first call, for the second chunk.
    """
    tau = f"{(tally['tokens'] - tally['replies']) / tally['passes']:.2f}" if tally["passes"] else "-"
    return f"tau {tau}" + (f", {1e9 * tally['timed'] / tally['ns']:.0f} tokens/s" if tally["timed"] else "")


class Conversation:
    """Holds the ids of a conversation. Emitted tokens are not encoded again, so the cache stays valid.

    If the template's text continues the text so far, only the rest is encoded. Otherwise the whole text is encoded:
    some templates trim replies or drop thoughts.
    """

    def __init__(self, tokenizer: Any, system: str | None) -> None:
        self.tokenizer = tokenizer
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self._ids: list[int] = []

    def prompt(self, content: str) -> list[int]:
        """Returns the prompt with a new message of the user."""
        text = chat_text(self.tokenizer, [*self.messages, {"role": "user", "content": content}])
        if self._ids and text.startswith(known := self._decode(self._ids)):
            new = self.tokenizer.encode(text[len(known) :], add_special_tokens=False, verbose=False)
            ids = [*self._ids, *new]
            if self._decode(ids) == text:
                return ids
        return encode_chat(self.tokenizer, text)

    def add(self, content: str, prompt: Sequence[int], reply: Sequence[int], stops: Sequence[int]) -> None:
        """Appends a message and its reply, without the stop token, which the template writes.

        Other special tokens of the reply stay. Without them, every later turn would be prefilled again.
        """
        kept = list(reply[:-1] if reply and reply[-1] in stops else reply)
        answer = self._decode(kept)
        self.messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        self._ids = [*prompt, *kept]

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


class Chat:
    """Runs the commands and messages of a chat."""

    def __init__(self, args: Args, target: Any, drafter: Any, tokenizer: Any, console: Console) -> None:
        self.args, self.target, self.drafter, self.tokenizer, self.console = args, target, drafter, tokenizer, console
        self.temperature, self.plain, self.turn = args.temperature, drafter is None, 0
        self.tallies = {"drafted": Counter[str](), "plain": Counter[str]()}
        self.reset()

    def reset(self) -> None:
        """Drops the conversation and its caches."""
        self.conversation = Conversation(self.tokenizer, self.args.system)
        self.session = Session(self.target, self.drafter, context=self.args.context)

    def line(self, text: str) -> bool:
        """Runs a line of the user; returns False at the end of the chat."""
        text = text.strip()
        if text in ("/quit", "/exit"):
            return False
        if text.startswith("/"):
            self.say(self.command(*text.partition(" ")[::2]))
        elif text:
            try:
                self.reply(text)
            except (ValueError, MemoryError) as error:  # the template raises, or the device is full: the chat continues
                self.say(f"{error}; this turn was dropped")
            except KeyboardInterrupt:
                self.say("interrupted: this turn was dropped")
        return True

    def command(self, name: str, value: str) -> str:
        """Runs a command and returns a message about its result."""
        match name, value:
            case "/reset", "":
                self.reset()
                return "the conversation is forgotten"
            case "/temp", _:
                try:
                    make_sampling(float(value))
                except ValueError:
                    return f"/temp must be a number of at least 0, got {value!r}. Type /temp 0.7."
                self.temperature = float(value)
                return f"temperature {self.temperature:g}"
            case "/plain", "" if self.drafter is None:
                return f"--method {self.args.method} has no drafter: /plain has no effect"
            case "/plain", "":
                self.plain = not self.plain
                return "plain decoding" if self.plain else f"drafting with {self.args.method}"
            case "/stats", "":
                used = f"{len(self.session.text)} of {self.session.context} tokens"
                parts = [f"temperature {self.temperature:g}; context: {used}"]
                for kind, tally in self.tallies.items():
                    if tally["replies"]:
                        parts.append(f"{kind}: replies {tally['replies']}, tokens {tally['tokens']}, {summary(tally)}")
                return "; ".join(parts)
            case "/help", "":
                return HELP
        return f"unknown command {name} {value}".rstrip() + f": {HELP}"

    def reply(self, content: str) -> None:
        """Sends a message and shows the reply as it comes.

        Raises:
          ValueError: the template rejects the message, or the context has no room for a reply.
          MemoryError: as `Session.stream`.
        """
        prompt, args = self.conversation.prompt(content), self.args
        room = min(args.max_new_tokens, self.session.context - len(prompt))
        if room < min(args.max_new_tokens, SHORTEST):
            raise ValueError(
                f"--context must leave room for a reply, got {self.session.context} for {len(prompt)} tokens so far. "
                "Type /reset, or start with a larger --context."
            )
        self.turn += 1
        key = jax.random.fold_in(jax.random.key(args.seed), self.turn)
        chunks = self.session.stream(
            prompt, max_new_tokens=room, temperature=self.temperature, top_k=args.top_k, top_p=args.top_p, key=key,
            plain=self.plain,
        )  # fmt: skip
        tally, reply, before = Counter(replies=1), list[int](), 0
        with stop_event() as stop, ReplyView(self.console, self.tokenizer) as view:
            view.show("reading the prompt; the first reply with new settings compiles first")
            for number, chunk in enumerate(chunks):
                now = time.perf_counter_ns()
                view.push(chunk)
                reply += chunk.tokens
                tally.update(tokens=len(chunk.tokens), passes=int(number > 0))  # the first chunk is the prefill
                if number > 1:
                    tally.update(timed=len(chunk.tokens), ns=now - before)
                view.show(f"{summary(tally)}, {len(reply)} tokens")
                before = now
                if stop.is_set():
                    break
        self.tallies["plain" if self.plain else "drafted"].update(tally)
        stops = self.target.config.eos_ids
        self.conversation.add(content, prompt, reply, stops)
        end = ", stopped" if stop.is_set() else ""
        if len(reply) == room and reply[-1] not in stops:
            end += ", cut: the context is full" if room < args.max_new_tokens else ", cut at --max-new-tokens"
        self.say(f"{summary(tally)}, prefilled {self.session.read} of {len(prompt)} prompt tokens{end}")

    def say(self, words: str) -> None:
        """Prints a message of the program."""
        self.console.out(f"[{words}]", style="dim", highlight=False)


def main(args: Args) -> None:
    """Runs the chat until the input ends."""
    at_least_one(args, "max_new_tokens")
    check_seed(args)
    make_sampling(args.temperature, args.top_k, args.top_p)  # raises before weights are read
    args = dataclasses.replace(args, method=method_of(args))
    check_methods([str(args.method)], args)
    use_compilation_cache()
    target, tokenizer = load_pair(args)
    drafter = Loader(target, args)(str(args.method))
    if chat_template(tokenizer) is None:
        text = "the tokenizer has no chat template: turns are joined by blank lines. Give --chat-template"
        print(f"warning: {text}", file=sys.stderr)
    with naming("--context", args.context):
        chat = Chat(args, target, drafter, tokenizer, stdout_console())
    name = args.target or "the bundled pair"
    print(f"{Path(name).name if Path(name).is_file() else name} with {args.method}. The first reply compiles.\n{HELP}")
    if sys.stdin.isatty():
        import readline  # noqa: F401 (gives `input` a history)
    while True:
        try:
            if not chat.line(input("> ")):
                break
        except EOFError:
            print()
            break
        except KeyboardInterrupt:
            print()
            chat.say("Ctrl-D or /quit ends the chat")


if __name__ == "__main__":
    run(main, Args, __doc__)
