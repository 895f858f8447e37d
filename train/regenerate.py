"""Generates with the target the replies that a draft head is trained on, as the papers do.

    python -m train.regenerate --target Qwen/Qwen3-8B --data chat.jsonl org/name#train --out runs/replies
    python -m train.regenerate --target demo --head demo --data "runs/data/*.jsonl" --out runs/replies

The target writes all assistant turns of every conversation, each behind its own earlier turns. `--head` drafts without
changing the replies. `OUT/*.jsonl` is a source for `train.head --data`, with the target's own token ids. A stopped run
continues when the same command is given again. Several processes (a TPU pod) share the shards; put `--out` on a disk
that all of them see. The last line of output is one JSON object.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import time
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm.contrib.logging import logging_redirect_tqdm

import eagle_jax
from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.stops import stop_ids
from eagle_jax.data.corpus.shards import Shard, add_reports, remember
from eagle_jax.data.corpus.sources import Source, corpus_key
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row
from eagle_jax.data.templates.keys import tokenizer_settings
from eagle_jax.parallel import processes
from eagle_jax.parallel.mesh import make_mesh
from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, check_seed, naming, not_negative, parse_tree, run
from train.loop.dialogues import Row, Writer, report_of
from train.loop.places import (
    alone_in,
    check_own,
    head_path,
    sources_of,
    target_config,
    target_path,
    tokenizer_of,
)
from train.loop.progress import progress

LONGEST_WAIT = 7 * 24 * 3600
"""Seconds that a process waits for the others to finish their shards."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program.

    Attributes:
      target: path or hub id of the model, or "demo".
      data: sources `path[#split]` of conversations.
      out: directory of the shards.
      tokenizer: path or hub id, if the target's directory has none.
      chat_template: Jinja file for a tokenizer without a template (Vicuna), or the name of one of the tokenizer's own.
      template_args: arguments of the chat template, NAME=VALUE each, such as enable_thinking=false.
      head: path of a head that drafts, or "demo"; None decodes without drafts.
      tree: depth,top_k,num_nodes of its drafts.
      limit: source rows to answer, drawn by the seed (a smaller limit draws a subset of a larger one's); None is all.
      batch: conversations at once, per process.
      max_new_tokens: longest reply.
      max_prompt: longest prompt; a conversation ends before a longer one.
      keep_cut: keep replies that --max-new-tokens cut off.
      temperatures: of the replies; rows take turns.
      top_k: of sampling; 0 is off.
      top_p: of sampling.
      seed: of sampling and of --limit.
      dtype: of weights and activations; bfloat16 is faster on accelerators.
      tensor: devices that the target is split over; the other devices of a process split the batch.
      shard_rows: source rows per shard.
    """

    target: str
    data: tuple[str, ...]
    out: Path
    tokenizer: str | None = None
    chat_template: str | None = None
    template_args: tuple[str, ...] = ()
    head: str | None = None
    tree: str = "3,2,5"
    limit: int | None = None
    batch: int = 64
    max_new_tokens: int = 1024
    max_prompt: int = 1024
    keep_cut: bool = True
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor: int = 1
    shard_rows: int = 1024


Numbered = tuple[int, str, dict[str, Any]]
"""A source row: its number among all rows of all sources, its source and its content."""

SETTLED = ("target", "tokenizer", "template_args", "data", "limit", "max_new_tokens", "max_prompt", "keep_cut",
           "temperatures", "top_k", "top_p", "seed", "dtype", "shard_rows")  # fmt: skip
"""Options that change the output; the others may differ when a run resumes."""


def main(args: Args) -> None:
    """Writes all shards of this process and prints a report."""
    check_own(args.out, ("settings.json",), "a directory of train.regenerate")
    at_least_one(args, "limit", "batch", "max_new_tokens", "max_prompt", "tensor", "shard_rows")
    not_negative(args, "top_k", "temperatures")
    check_seed(args)
    if not args.temperatures:
        raise ValueError("--temperatures must be at least one number, got none.")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p must be above 0 and at most 1, got {args.top_p}.")
    if not args.data:
        raise ValueError("--data must name at least one source, got none.")
    processes.initialise()
    sources = sources_of(args.data)
    parse_tree(args.tree)
    config = target_config(args.target)
    if args.head is not None:
        head_path(args.head)  # raises if there is none
    if args.max_prompt + args.max_new_tokens > config.max_position:
        raise ValueError(
            f"--max-prompt {args.max_prompt} plus --max-new-tokens {args.max_new_tokens} must be at most the target's "
            f"{config.max_position} tokens of context. Lower one of them."
        )
    tokenizer = tokenizer_of(args.target, config, args)
    chosen = choose(survey(sources, tokenizer), args.limit, args.seed)
    writer = load(args, config, tokenizer, len(chosen))
    settings = {name: getattr(args, name) for name in SETTLED}
    contents = {
        "contents of data": corpus_key(sources, tokenizer),
        **tokenizer_settings(tokenizer),
        "stop tokens": writer.stops,
        "weights": processes.fingerprint(writer.target.params),
    }
    with alone_in(args.out, jax.process_index() == 0):
        remember(args.out, {**settings, **contents})
        write(args, writer, sources, chosen)


def write(args: Args, writer: Writer, sources: Sequence[Source], chosen: np.ndarray) -> None:
    """Writes the missing shards of this process, waits for the other processes, and prints a report.

    Raises:
      ValueError: no reply was written.
    """
    process, count = jax.process_index(), jax.process_count()
    shards = {number: Shard(args.out, number) for number in range(process, -(-len(chosen) // args.shard_rows), count)}
    left = {number: shard for number, shard in shards.items() if not shard.whole}
    size = sum(len(chosen[number * args.shard_rows :][: args.shard_rows]) for number in left)
    if left:
        logging.info("%d rows, %d at once; the first batch waits for the compiler", size, writer.lanes)
    start, tokens = time.perf_counter(), 0
    with progress(size, sum(len(shard.done) for shard in left.values()), "rows") as bar, logging_redirect_tqdm():
        for number, rows in read_shards(sources, chosen, args.shard_rows, left) if left else ():
            tokens += write_shard(writer, args.temperatures, left[number], rows, bar)
    speed = tokens / (time.perf_counter() - start)
    report = add_reports(*(shard.report() for shard in shards.values()), {"shards": len(shards)})
    if count > 1:
        # Not a collective: those time out after seconds, and one process may finish hours before another.
        ocp.multihost.sync_global_processes("regenerate", timeout=LONGEST_WAIT, processes=set(range(count)))
    report = add_reports(*processes.everyones(report))
    speed = sum(processes.everyones(speed))
    if not report["texts"]:
        reasons = "; ".join(f"{rows} x {reason}" for reason, rows in report["skipped"].items())
        raise ValueError(f"no reply was written: {reasons}")
    if process == 0:
        tau = (report["reply_tokens"] - report["replies"]) / max(report.pop("cycles"), 1)
        extra = {"tau": round(tau, 3)} if writer.head is not None else {}
        extra |= {"tokens_per_second": round(speed, 1)} if speed else {}  # 0 if all shards existed
        print(json.dumps({**report, **extra, "out": str(args.out)}))


def survey(sources: Sequence[Source], tokenizer: Any) -> int:
    """Counts the rows and checks that every source has rows, and at least one row a reply to write.

    Raises:
      ValueError: naming the source, or the reasons.
    """
    total, usable, reasons = 0, False, collections.Counter[str]()
    for source in sources:
        if source.weight is not None:
            logging.info("%s: the weight (@) is for training; every row is answered once", source.path)
        before = total
        for row in source.rows():
            total += 1
            if not usable:
                try:
                    Dialogue.begin(parse_row(row)).prompt(tokenizer)
                    usable = True
                except SkippedRow as error:
                    reasons[str(error)] += 1
        if total == before:
            raise ValueError(f"--data must hold rows, got {source.path}, which is empty.")
    if not usable:
        found = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        raise ValueError(f"no row has a reply to be written: {found}")
    return total


def choose(total: int, limit: int | None, seed: int) -> np.ndarray:
    """Returns sorted row numbers: all, or `limit` of them drawn at random."""
    rows = np.arange(total)
    return rows if limit is None else np.sort(np.random.default_rng(seed).permutation(rows)[:limit])


def load(args: Args, config: DecoderConfig, tokenizer: Any, rows: int) -> Writer:
    """Loads target and head onto the devices of this process."""
    devices = jax.local_devices()
    if len(devices) % args.tensor:
        raise ConfigError(f"--tensor must divide the {len(devices)} devices of a process, got {args.tensor}.")
    data = len(devices) // args.tensor
    mesh = make_mesh(data, args.tensor, devices=devices) if len(devices) > 1 else None
    tree = parse_tree(args.tree)
    with naming("--target", args.target):
        target = eagle_jax.load_target(target_path(args.target), args.dtype, mesh=mesh)
    head = None
    if args.head is not None:
        with naming("--head", args.head):
            head = eagle_jax.load_drafter(head_path(args.head), target, tree)
    stops = stop_ids(config, tokenizer)
    lanes = -(-min(args.batch, args.shard_rows, rows) // data) * data
    return Writer(target, head, tokenizer, stops, lanes, args.seed, args.max_new_tokens, args.max_prompt,
                  args.keep_cut, args.top_k, args.top_p)  # fmt: skip


def read_shards(
    sources: Sequence[Source], chosen: np.ndarray, size: int, wanted: Container[int]
) -> Iterator[tuple[int, list[Numbered]]]:
    """Yields number and rows of the wanted shards."""
    numbered = ((index, *row) for index, row in enumerate((one.path, row) for one in sources for row in one.rows()))
    places = {row: place for place, row in enumerate(chosen.tolist())}
    kept = (row for row in numbered if row[0] in places)
    for number, rows in itertools.groupby(kept, lambda row: places[row[0]] // size):
        if number in wanted:
            yield number, list(rows)


def write_shard(
    writer: Writer, temperatures: Sequence[float], shard: Shard, given: Sequence[Numbered], bar: Any
) -> int:
    """Writes the missing rows of a shard; returns the number of generated tokens.

    A batch that was interrupted is repeated with the same rows, so that rounding is the same.
    """
    rows: list[Row] = []
    skipped: dict[int, str] = {}
    for index, source, row in given:
        try:
            rows.append(Row(index, source, Dialogue.begin(parse_row(row)), temperatures[index % len(temperatures)]))
        except SkippedRow as error:
            skipped[index] = str(error)
    if set(skipped) - shard.done:
        reasons = dict(collections.Counter(skipped.values()))
        shard.append(list(skipped), [], report_of(len(skipped), skipped=reasons))
        bar.update(len(skipped))
    tokens = 0
    for batch in writer.batches(rows):
        if {row.number for row in batch} <= shard.done:
            continue
        found = [(row, *answer) for row, answer in zip(batch, writer.converse(batch), strict=True)]
        new = [entry for entry in found if entry[0].number not in shard.done]  # all, unless --batch has changed
        texts = [
            {"row": row.number, "source": row.source, **text.as_row(), "temperature": row.temperature}
            for row, dialogue, _ in new
            for text in dialogue.texts
        ]
        report = add_reports(*(report for _, _, report in new))
        shard.append([row.number for row, _, _ in new], texts, report)
        bar.update(len(new))
        tokens += report["reply_tokens"]
    shard.finish()
    return tokens


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
