"""Generates with the target the replies that a draft head is trained on, as the papers do.

    python -m train.regenerate --target Qwen/Qwen3-8B --data chat.jsonl org/name#train --out runs/replies
    python -m train.regenerate --target demo --head demo --data "runs/data/*.jsonl" --out runs/replies

The target writes all assistant turns of every conversation, each after its own earlier replies. `--head` makes this
faster and does not change the replies. `OUT/*.jsonl` is a source for `train.head --data`, with the target's own token
ids. The same command continues a stopped run. Several processes (a TPU pod) share the shards; put `--out` on a disk
that all of them can read. The last line of output is one JSON object.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
from collections.abc import Container, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from tqdm.contrib.logging import logging_redirect_tqdm

import eagle_jax
from eagle_jax.config import ConfigError, DecoderConfig, TreeConfig
from eagle_jax.data.chat import Dialogue, stop_ids, tokenizer_settings
from eagle_jax.data.corpus import Report, Shard, Source, add_reports, corpus_key, remember
from eagle_jax.data.rows import SkippedRow, parse_row
from eagle_jax.parallel import make_mesh, processes
from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, check_seed, naming, not_negative, parse_tree, run
from train.loop.log import progress_bar
from train.loop.options import CorpusArgs
from train.loop.places import alone_in, head_path, read_target, sources_of, target_config, tokenizer_of

MAY_CHANGE = ("out", "head", "tree", "batch", "tensor", "chat_template")
"""Options that may differ when a run resumes: the output is the same. The template's text is compared, not its path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(CorpusArgs):
    """Options of the program."""

    head: str | None = None  # path of a head that drafts, or "demo"; None decodes without drafts
    tree: str = "3,2,5"  # depth,top_k,num_nodes of its drafts
    # source rows to answer, drawn by the seed (a smaller limit draws a subset of a larger one's); None is all
    limit: int | None = None
    batch: int = 64  # conversations at once, per process
    max_new_tokens: int = 1024  # longest reply
    max_prompt: int = 1024  # longest prompt; a conversation ends before a longer one
    # keep replies that --max-new-tokens cut off; otherwise the conversation ends before such a reply
    keep_cut: bool = True
    temperatures: tuple[float, ...] = (0.0, 1.0)  # temperatures of the replies; rows take turns
    top_k: int = 0  # likeliest tokens to sample from; 0 is off
    top_p: float = 1.0  # least probability mass to sample from
    seed: int = 0  # seed of sampling and of --limit
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and activations; use bfloat16 on accelerators
    tensor: int = 1  # devices that the target is split over; the other devices of a process split the batch
    shard_rows: int = 1024  # source rows per shard


class Row(NamedTuple):
    """Holds a row of a source: its number among all rows, and the temperature of its replies."""

    number: int
    source: str
    dialogue: Dialogue
    temperature: float


@dataclasses.dataclass(frozen=True)
class Writer:
    """Generates replies with a target and optionally a head, which changes no reply."""

    args: Args
    target: eagle_jax.Target
    head: eagle_jax.BoundDrafter | None
    tokenizer: Any  # tokenizer of `transformers`, with a chat template
    stops: tuple[int, ...]  # tokens that end a reply
    lanes: int  # conversations at once; every batch has this size, so that all share one compilation

    def batches(self, rows: Sequence[Row]) -> list[list[Row]]:
        """Groups rows of one temperature and similar numbers of turns, so that few lanes are idle."""
        ordered = sorted(rows, key=lambda row: (row.temperature, len(row.dialogue.pending), row.number))
        groups = [list(group) for _, group in itertools.groupby(ordered, lambda row: row.temperature)]
        return [group[at : at + self.lanes] for group in groups for at in range(0, len(group), self.lanes)]

    def generate_replies(self, batch: Sequence[Row]) -> list[tuple[Dialogue, Report]]:
        """Answers one of `batches`, turn by turn; returns every conversation with its report.

        A conversation ends where the target's logits are not finite; the others continue.

        Raises:
          eagle_jax.NotFiniteError: the head's drafts are NaN.
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
                out = eagle_jax.generate(
                    self.target, self.head, prompts, max_new_tokens=budgets, temperature=batch[0].temperature,
                    top_k=args.top_k, top_p=args.top_p, eos_ids=self.stops, key=keys,
                )  # fmt: skip
            except eagle_jax.NotFiniteError as error:
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


def main(args: Args) -> None:
    """Writes all shards of this process and prints a report."""
    at_least_one(args, "limit", "batch", "max_new_tokens", "max_prompt", "tensor", "shard_rows")
    not_negative(args, "top_k", "temperatures")
    check_seed(args)
    if not args.temperatures:
        raise ValueError("--temperatures must be at least one number, got none. Give one, such as 0.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {args.top_p}. Give 1 to keep all tokens.")
    processes.initialise()
    sources, tree, config = sources_of(args.data), parse_tree(args.tree), target_config(args.target)
    if args.head is not None:
        head_path(args.head)  # raises if there is none
    if args.max_prompt + args.max_new_tokens > config.max_position:
        raise ValueError(
            f"--max-prompt plus --max-new-tokens must be at most the target's {config.max_position} tokens of context, "
            f"got {args.max_prompt} plus {args.max_new_tokens}. Lower one of them."
        )
    with alone_in(args.out, ("settings.json",), "a directory of train.regenerate"):
        tokenizer = tokenizer_of(args, config)
        rows = np.arange(count_rows(sources, tokenizer))
        if args.limit is not None:
            rows = np.sort(np.random.default_rng(args.seed).permutation(rows)[: args.limit])
        writer = load(args, tree, config, tokenizer, len(rows))
        settings = {name: value for name, value in dataclasses.asdict(args).items() if name not in MAY_CHANGE}
        contents = {"contents of data": corpus_key(sources, tokenizer), **tokenizer_settings(tokenizer)}
        # Replaces the scheme, on which it depends.
        weights = processes.fingerprint(writer.target.params, writer.target.config)
        remember(args.out, {**settings, **contents, "stop tokens": writer.stops, "weights": weights})
        write(writer, sources, rows)


def write(writer: Writer, sources: Sequence[Source], chosen: np.ndarray) -> None:
    """Writes the missing shards of this process, waits for the other processes, and prints a report.

    Raises:
      ValueError: no reply was written.
    """
    args, process, count = writer.args, jax.process_index(), jax.process_count()
    shards = {number: Shard(args.out, number) for number in range(process, -(-len(chosen) // args.shard_rows), count)}
    left = {number: shard for number, shard in shards.items() if not shard.whole}
    size = sum(len(chosen[number * args.shard_rows :][: args.shard_rows]) for number in left)
    if left:
        logging.info("%d rows, %d at once; the first batch compiles first", size, writer.lanes)
    with progress_bar(size, sum(len(shard.done) for shard in left.values()), "rows") as bar, logging_redirect_tqdm():
        for number, rows in read_shards(sources, chosen, args.shard_rows, left) if left else ():
            write_shard(writer, left[number], rows, bar)
    report = add_reports(*(shard.report() for shard in shards.values()), {"shards": len(shards)})
    if count > 1:
        # Not a collective: those time out after seconds, and one process may finish days before another.
        ocp.multihost.sync_global_processes("regenerate", timeout=7 * 24 * 3600, processes=set(range(count)))
    report = add_reports(*processes.gather_values(report))
    if not report["texts"]:
        raise ValueError(f"--data must get a reply, got none: {_listed(report['skipped'])}. Mend the rows or options.")
    tau = (report["reply_tokens"] - report["replies"]) / max(report.pop("cycles"), 1)
    extra = {} if writer.head is None else {"tau": round(tau, 3)}
    if process == 0:
        print(json.dumps({**report, **extra, "out": str(args.out)}))


def count_rows(sources: Sequence[Source], tokenizer: Any) -> int:
    """Counts the rows. Checks that every source has rows, and that at least one row has a reply to write.

    Raises:
      ValueError: a source is empty, or no row has a reply to write; the message has the reasons.
    """
    total, usable, reasons = 0, False, collections.Counter[str]()
    for source in sources:
        before = total
        for row in source.rows():
            total += 1
            if not usable:
                try:
                    usable = bool(Dialogue.begin(parse_row(row)).prompt(tokenizer))
                except SkippedRow as error:
                    reasons[str(error)] += 1
        if total == before:
            raise ValueError(f"--data must hold rows, got {source.path}, which is empty. Leave it out.")
    if not usable:
        raise ValueError(f"--data must hold a row with a reply to write, got none: {_listed(reasons)}. Mend them.")
    return total


def _listed(reasons: dict[str, int]) -> str:
    return "; ".join(f"{count} x {reason}" for reason, count in reasons.items())


def load(args: Args, tree: TreeConfig, config: DecoderConfig, tokenizer: Any, rows: int) -> Writer:
    """Loads target and head onto the devices of this process."""
    devices = jax.local_devices()
    if len(devices) % args.tensor:
        raise ConfigError(f"--tensor must divide the {len(devices)} devices of a process, got {args.tensor}. Lower it.")
    data = len(devices) // args.tensor
    mesh = make_mesh(data, args.tensor, devices=devices) if len(devices) > 1 else None
    target = read_target(args, mesh)
    head = None
    if args.head is not None:
        with naming("--head", args.head):
            head = eagle_jax.load_drafter(head_path(args.head), target, tree)
    lanes = -(-min(args.batch, args.shard_rows, rows) // data) * data
    return Writer(args, target, head, tokenizer, stop_ids(config, tokenizer), lanes)


def read_shards(
    sources: Sequence[Source], chosen: np.ndarray, size: int, wanted: Container[int]
) -> Iterator[tuple[int, list[tuple[int, str, dict[str, Any]]]]]:
    """Yields every wanted shard: its number, and of each row the number among all, source and content."""
    numbered = ((index, *row) for index, row in enumerate((one.path, row) for one in sources for row in one.rows()))
    places = {row: place for place, row in enumerate(chosen.tolist())}
    kept = (row for row in numbered if row[0] in places)
    for number, rows in itertools.groupby(kept, lambda row: places[row[0]] // size):
        if number in wanted:
            yield number, list(rows)


def write_shard(writer: Writer, shard: Shard, given: Sequence[tuple[int, str, dict[str, Any]]], bar: Any) -> None:
    """Writes the missing rows of a shard, by whole batches: rounding depends on the batch."""
    temperatures = writer.args.temperatures
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    for index, source, row in given:
        try:
            rows.append(Row(index, source, Dialogue.begin(parse_row(row)), temperatures[index % len(temperatures)]))
        except SkippedRow as error:
            skipped[index] = str(error)
    if set(skipped) - shard.done:
        shard.append(list(skipped), [], report_of(len(skipped), skipped=dict(collections.Counter(skipped.values()))))
        bar.update(len(skipped))
    for batch in writer.batches(rows):
        if {row.number for row in batch} <= shard.done:
            continue
        found = [(row, *answer) for row, answer in zip(batch, writer.generate_replies(batch), strict=True)]
        new = [entry for entry in found if entry[0].number not in shard.done]  # all, unless --batch has changed
        texts = [
            {"row": row.number, "source": row.source, **text.as_row(), "temperature": row.temperature}
            for row, dialogue, _ in new
            for text in dialogue.texts
        ]
        shard.append([row.number for row, _, _ in new], texts, add_reports(*(report for _, _, report in new)))
        bar.update(len(new))
    shard.finish()


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


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
