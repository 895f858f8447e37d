"""Generates all assistant turns of many conversations at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.corpus.shards import Report
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.runtime.drafters import BoundDrafter
from eagle_jax.runtime.errors import NotFiniteError
from eagle_jax.runtime.generation import generate
from eagle_jax.runtime.target import Target
from train.loop.options import RegenerateArgs


class Row(NamedTuple):
    """Holds a row of a source: its number among all rows, and the temperature of its replies."""

    number: int
    source: str
    dialogue: Dialogue
    temperature: float


@dataclasses.dataclass(frozen=True)
class Writer:
    """Generates replies with a target and optionally a head, which changes no reply."""

    args: RegenerateArgs
    target: Target
    head: BoundDrafter | None
    tokenizer: Any  # of `transformers`, with a chat template
    stops: tuple[int, ...]  # tokens that end a reply
    lanes: int  # conversations at once; every batch has this size, so that all share one compilation

    def batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Groups rows of one temperature and similar numbers of turns, so that few lanes are idle."""
        ordered = sorted(rows, key=lambda row: (row.temperature, len(row.dialogue.pending), row.number))
        batches: list[list[Row]] = []
        for row in ordered:
            if not batches or len(batches[-1]) == self.lanes or batches[-1][0].temperature != row.temperature:
                batches.append([])
            batches[-1].append(row)
        return batches

    def converse(self, batch: Sequence[Row]) -> list[tuple[Dialogue, Report]]:
        """Answers one of `batches`, turn by turn; returns every conversation with its report.

        A conversation ends where the target's logits are not finite; the others continue.

        Raises:
          NotFiniteError: the head's drafts are NaN.
        """
        args = self.args
        dialogues = [row.dialogue for row in batch]
        reports = [report_of(1) for _ in batch]
        numbers = jnp.asarray([row.number for row in batch] + [0] * (self.lanes - len(batch)), jnp.uint32)
        for turn in range(max(len(dialogue.pending) for dialogue in dialogues)):
            prompts = [[0]] * self.lanes  # idle lanes end after one token
            budgets = [1] * self.lanes
            for lane, dialogue in enumerate(dialogues):
                if dialogue.open:
                    dialogues[lane], prompt = self._next_prompt(dialogue)
                    if prompt:
                        prompts[lane], budgets[lane] = prompt, args.max_new_tokens
            active = [lane for lane, dialogue in enumerate(dialogues) if dialogue.open]
            if not active:
                break
            keys, faults = _keys(jax.random.key(args.seed, impl="threefry2x32"), numbers, turn), {}
            try:
                out = generate(
                    self.target, self.head, prompts, max_new_tokens=budgets, temperature=batch[0].temperature,
                    top_k=args.top_k, top_p=args.top_p, eos_ids=self.stops, key=keys,
                )  # fmt: skip
            except NotFiniteError as error:
                if error.drafts:  # a broken head would slow down the whole run
                    raise
                out, faults = error.output, error.positions
            for lane in active:
                reports[lane]["cycles"] += int(out.cycles[lane])
                if lane in faults:
                    dialogues[lane] = dialogues[lane].end("the target's logits are not finite")
                else:
                    dialogues[lane] = self._record(dialogues[lane], prompts[lane], out.tokens[lane], reports[lane])
        for dialogue, report in zip(dialogues, reports, strict=True):
            report["texts"] = len(dialogue.texts)
            if dialogue.ended is not None:
                report["shortened" if dialogue.texts else "skipped"] = {dialogue.ended: 1}
        return list(zip(dialogues, reports, strict=True))

    def _next_prompt(self, dialogue: Dialogue) -> tuple[Dialogue, list[int]]:
        try:
            prompt = dialogue.prompt(self.tokenizer)
        except SkippedRow as error:
            return dialogue.end(str(error)), []
        if len(prompt) > self.args.max_prompt:
            return dialogue.end(f"prompt longer than --max-prompt {self.args.max_prompt}"), []
        return dialogue, prompt

    def _record(self, dialogue: Dialogue, prompt: list[int], reply: list[int], report: Report) -> Dialogue:
        report["replies"] += 1
        report["reply_tokens"] += len(reply)
        if reply[-1] not in self.stops:
            report["cut"] += 1
            if not self.args.keep_cut:
                return dialogue.end(f"reply cut by --max-new-tokens {self.args.max_new_tokens}")
        return dialogue.answered(self.tokenizer, prompt, reply, self.stops)


def report_of(rows: int, **counts: Any) -> Report:
    """Returns counts of some rows.

    `texts` are finished conversations; `replies` have `reply_tokens` from `cycles` target passes; `cut` replies reached
    their budget. Rows without a text are `skipped`, conversations that ended early are `shortened`, both by reason.
    """
    empty = {"texts": 0, "replies": 0, "reply_tokens": 0, "cycles": 0, "cut": 0, "skipped": {}, "shortened": {}}
    return {"rows": rows, **empty, **counts}


@jax.jit
def _keys(key: jax.Array, rows: jax.Array, turn: int | jax.Array) -> jax.Array:
    """Returns a key per row that depends on seed, row number and turn, not on the batch."""
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), turn))(rows)
