"""Writes a chat model's own replies to prompts of data sets and to prompts that it invents, in large batches."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.core import Batch, Engine, GenerateState, Params, Sampling, Sizes, make_sampling, required_slots, step
from eagle_jax.data.chat import chat_ids, chat_text, encode_chat
from eagle_jax.drafters import vanilla_drafter
from eagle_jax.runtime.generation import prefill_program
from eagle_jax.runtime.request import round_up
from infer.common.tasks import HUB, find_task, read_questions
from train.demo.data import COMPLETE, chat_turns

GRAM = 13
"""Tokens in a row that a prompt must not share with a benchmark question."""
HELD_OUT = 64
"""One prompt in so many is held out, of every source."""
OWN = {"own": "", "own completion": COMPLETE + "def"}
"""Sources of prompts that the target invents, and the words that each prompt begins with."""
OWN_LENGTHS = range(6, 121)
"""Numbers of tokens that the target may add to them."""
CYCLES = 64
"""Decoded tokens between two looks at which rows have ended."""
FUNCTION = re.compile(r"^(?:(?:import|from) [^\n]*\n|\n)*def \w+\([^\n]*\):\n", re.MULTILINE)


class Prompt(NamedTuple):
    """Holds the tokens of a prompt."""

    source: str
    tokens: list[int]
    held_out: bool


def read_messages(data: Path) -> Iterator[tuple[str, str]]:
    """Yields source and text of every user's message: questions, instructions, functions to complete."""
    for source, prompt, reply in chat_turns(data):
        yield source, prompt
        head = None if source == "gsm8k" else FUNCTION.search(reply)
        if head is not None and reply.count("def ") <= 3:
            quoted = prompt.replace('"""', "")
            yield "completion", f'{COMPLETE}{head[0]}    """{quoted}\n    """\n'


class Prompts:
    """Makes prompts of at most `longest` tokens that share no run of `GRAM` tokens with a question of `tasks`."""

    def __init__(self, tokenizer: Any, tasks: Path, longest: int) -> None:
        self.tokenizer, self.longest = tokenizer, longest
        before, _, after = chat_text(tokenizer, [{"role": "user", "content": "MESSAGE"}]).partition("MESSAGE")
        self.start, self.end = encode_chat(tokenizer, before), encode_chat(tokenizer, after)
        texts = [turn for name in HUB for one in read_questions(find_task(name, tasks)) for turn in one.turns]
        self.kept_out = {gram for text in texts for gram in self._grams(self._encode(text))}

    def read(self, data: Path, rng: np.random.Generator) -> list[Prompt]:
        """Reads the prompts of the data sets, shuffled within every source."""
        found: dict[str, list[list[int]]] = collections.defaultdict(list)
        for source, text in read_messages(data):
            found[source].append(self._encode(text))
        shuffled = {source: [some[at] for at in rng.permutation(len(some))] for source, some in found.items()}
        return [prompt for source, some in shuffled.items() for prompt in self._select(source, some)]

    def invent(self, decoder: Decoder, batches: Sequence[int]) -> list[Prompt]:
        """Lets the target continue an empty turn of the user (Magpie, arXiv:2406.08464); `batches` is per `OWN`."""
        prompts: list[Prompt] = []
        for (source, words), count in zip(OWN.items(), batches, strict=True):
            begun = [*self.start, *(encode_chat(self.tokenizer, words) if words else [])]
            batch = [begun] * decoder.rows
            replies = [reply for _ in range(count) for reply in decoder.decode(batch, 1.0, OWN_LENGTHS.stop)]
            ended = [reply[:-1] for reply in replies if reply and reply[-1] in decoder.target.config.eos_ids]
            prompts += self._select(source, [[*begun, *text, *self.end] for text in ended if len(text) in OWN_LENGTHS])
        return prompts

    def _encode(self, text: str) -> list[int]:
        return chat_ids(self.tokenizer, [{"role": "user", "content": text}])

    def _grams(self, prompt: Sequence[int]) -> set[tuple[int, ...]]:
        """Returns all runs of `GRAM` tokens of the user's message; a shorter message is one run."""
        message = tuple(prompt[len(self.start) : len(prompt) - len(self.end)])
        return {message[at : at + GRAM] for at in range(max(1, len(message) - GRAM + 1))}

    def _select(self, source: str, found: Sequence[list[int]]) -> list[Prompt]:
        unique = {tuple(tokens): tokens for tokens in found if len(tokens) <= self.longest}.values()
        kept = [tokens for tokens in unique if self.kept_out.isdisjoint(self._grams(tokens))]
        logging.info("%s: %d of %d prompts are short, new and in no benchmark", source, len(kept), len(found))
        return [Prompt(source, tokens, index % HELD_OUT == 0) for index, tokens in enumerate(kept)]


@functools.partial(jax.jit, static_argnames="engine", donate_argnames="state")
def advance(params: Params, state: GenerateState, sampling: Sampling, engine: Engine) -> GenerateState:
    """Runs `CYCLES` cycles of the engine, or fewer if all rows end."""
    cycle = lambda carry: (carry[0] + 1, step(params, carry[1], sampling, engine)[0])  # noqa: E731
    return jax.lax.while_loop(lambda carry: (carry[0] < CYCLES) & ~jnp.all(carry[1].done), cycle, (0, state))[1]


@jax.jit
def take_rows(state: GenerateState, rows: jax.Array) -> GenerateState:
    """Returns some rows of a batch in progress."""
    return jax.tree.map(lambda leaf: leaf[rows], state)


@dataclasses.dataclass
class Decoder:
    """Decodes prompts plainly, in batches of one shape, so that all share their programs.

    Attributes:
      target: its configuration has the stop tokens. rows: of a batch. longest: most tokens of a prompt.
      max_tokens: most tokens of a reply. seed: of sampling. calls: number of batches so far.
    """

    target: eagle_jax.Target
    rows: int
    longest: int
    max_tokens: int
    seed: int = 0
    calls: int = 0

    def decode(self, prompts: Sequence[list[int]], temperature: float, budget: int | None = None) -> list[list[int]]:
        """Returns the replies to at most `rows` prompts, with their stop tokens.

        When half of the rows have ended, the others continue without them, down to a quarter of a batch.

        Args:
          budget: most tokens of a reply, below `max_tokens`.
        """
        self.calls += 1
        idle = [[0]] * (self.rows - len(prompts))  # these rows end with their first token
        padded = np.zeros((self.rows, self.longest), np.int32)
        for row, prompt in zip(padded, [*prompts, *idle], strict=True):
            row[: len(prompt)] = prompt
        lengths = [len(prompt) for prompt in [*prompts, *idle]]
        budgets = [min(budget or self.max_tokens, self.max_tokens)] * len(prompts) + [1] * len(idle)
        stops = np.tile(np.array(self.target.config.eos_ids, np.int32), (self.rows, 1))
        keys = jax.random.split(jax.random.fold_in(jax.random.key(self.seed), self.calls), self.rows)
        batch = Batch(jnp.asarray(padded), jnp.asarray(lengths), jnp.asarray(budgets), jnp.asarray(stops), keys)
        params = {"target": self.target.params, "drafter": {}}
        sampling, engine = make_sampling(temperature), Engine(self.target.fn, vanilla_drafter())
        chunk = math.gcd(self.longest, 32)
        slots = round_up(required_slots(self.longest, self.max_tokens, 0, chunk), 64)
        state = prefill_program(params, batch, sampling, engine, Sizes(self.max_tokens, chunk, slots))
        replies = [list[int]()] * self.rows
        places = list(range(self.rows))  # row in the batch of every row in the state
        while True:
            tokens, counts, done = jax.device_get((state.tokens, state.num_tokens, state.done))
            for at in np.flatnonzero(done).tolist():
                replies[places[at]] = tokens[at, : counts[at]].tolist()
            if done.all():
                return replies[: len(prompts)]
            if 2 * np.sum(~done) <= len(places) and 4 * len(places) > self.rows:
                kept = np.argsort(done, kind="stable")[: len(places) // 2]  # unfinished rows come first
                state, places = take_rows(state, kept), [places[at] for at in kept.tolist()]
            state = advance(params, state, sampling, engine)


def schedule(prompts: Sequence[Prompt], rows: int, rng: np.random.Generator) -> list[tuple[float, list[Prompt]]]:
    """Returns batches of one source, with their temperatures, in the order of decoding.

    A source's batches are at temperatures 0 and 1 in turns, those of a second round at 1.
    """
    ordered: list[tuple[float, list[Prompt]]] = []
    for turn in range(2):
        batches: list[tuple[float, list[Prompt]]] = []
        for source in dict.fromkeys(prompt.source for prompt in prompts):
            mine = [prompt for prompt in prompts if prompt.source == source]
            parts = [mine[at : at + rows] for at in range(0, len(mine), rows)]
            batches += [(float(turn or number % 2), part) for number, part in enumerate(parts)]
        ordered += [batches[at] for at in rng.permutation(len(batches))]
    return ordered


def write_replies(
    decoder: Decoder, batches: Sequence[tuple[float, list[Prompt]]], deadline: float
) -> dict[bool, list[dict[str, Any]]]:
    """Decodes batches until `deadline` (`time.monotonic`); returns rows as of `train.regenerate`, by `held_out`."""
    rows: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    tokens: collections.Counter[str] = collections.Counter()
    for number, (temperature, prompts) in enumerate(batches, 1):
        replies = decoder.decode([prompt.tokens for prompt in prompts], temperature)
        for prompt, reply in zip(prompts, replies, strict=True):
            if len(reply) > 1:
                text, start = [*prompt.tokens, *reply], len(prompt.tokens)
                row = {"tokens": text, "supervised": [[start, len(text)]], "source": prompt.source}
                rows[prompt.held_out].append({**row, "temperature": temperature})
                tokens[prompt.source] += len(reply)
        logging.info("batch %d of %d: %d reply tokens", number, len(batches), tokens.total())
        if time.monotonic() > deadline:
            break
    logging.info("reply tokens: %s", dict(tokens))
    return rows
