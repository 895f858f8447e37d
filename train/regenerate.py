"""Lets the target write the replies that a draft head is trained on, as the papers do.

    python -m train.regenerate --target Qwen/Qwen3-8B --data chat.jsonl org/name#train --out runs/replies
    python -m train.regenerate --target demo --head demo --data "runs/data/*.jsonl" --out runs/replies

Every row is a conversation, of which the target writes all the assistant's turns, its own earlier ones before it. With
`--head` a head drafts; the replies are the same. `OUT/*.jsonl` is then a source for `train.head --data`, with the very
tokens of the target. A run that was stopped in whatever way goes on where it was when the command is given again.
Several processes (a TPU pod, say) share the shards; `--out` is then best on a disk that all of them see. The last line
printed is one JSON object.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm.contrib.logging import logging_redirect_tqdm

import eagle_jax
from eagle_jax.config import ConfigError, DecoderConfig
from eagle_jax.data.keys import tokenizer_settings
from eagle_jax.data.replies import Dialogue
from eagle_jax.data.rows import parse_row
from eagle_jax.data.shards import Shard, add_reports, remember
from eagle_jax.data.sources import Source, corpus_key
from eagle_jax.data.stops import stop_ids
from eagle_jax.data.templates import SkippedRow
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
from train.loop.progress import Progress

LONGEST_WAIT = 7 * 24 * 3600
"""Seconds that a process waits for the others to finish their shards."""


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      target: path or hub id of the model, or "demo".
      data: sources `path[#split]` of conversations.
      out: directory of the shards.
      tokenizer: path or hub id, if it is not beside the target.
      chat_template: Jinja file, for a tokenizer without one (Vicuna), or the name of one of the tokenizer's own.
      template_args: arguments of the chat template, NAME=VALUE each, such as enable_thinking=false.
      head: path of a head that drafts, or "demo"; None decodes plainly.
      tree: depth,top_k,num_nodes of its drafts.
      limit: source rows to answer, drawn by the seed (a smaller number draws some of a larger one's); None is all.
      batch: conversations at once, per process.
      max_new_tokens: longest reply.
      max_prompt: longest prompt; conversations end before a longer one.
      keep_cut: keep replies that --max-new-tokens cut off.
      temperatures: rows take turns.
      top_k: of the sampled law; 0 is off.
      top_p: of the sampled law.
      seed: of the sampling, and of what --limit draws.
      dtype: of weights and activations; bfloat16 is the fast one on accelerators.
      tensor: devices that the target is split over; the others of a process split the batch.
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
"""A source row: its number among all rows of all sources, where it is from, and its content."""

SETTLED = ("target", "tokenizer", "template_args", "data", "limit", "max_new_tokens", "max_prompt", "keep_cut",
           "temperatures", "top_k", "top_p", "seed", "dtype", "shard_rows")  # fmt: skip
"""Arguments that decide what is written; the others may change when a run goes on."""


def main(args: Args) -> None:
    """Writes all shards of this process and prints what was written."""
    check_own(args.out, ("settings.json",), "a directory of train.regenerate")
    at_least_one(args, "limit", "batch", "max_new_tokens", "max_prompt", "tensor", "shard_rows")
    not_negative(args, "top_k", "temperatures")
    check_seed(args)
    if not args.temperatures:
        raise ValueError(f"--temperatures {args.temperatures} must be at least one number")
    if not 0 < args.top_p <= 1:
        raise ValueError(f"--top-p {args.top_p} must lie above 0 and be at most 1")
    if not args.data:
        raise ValueError("--data needs at least one source")
    processes.initialise()
    sources = sources_of(args.data)
    parse_tree(args.tree)
    config = target_config(args.target)
    if args.head is not None:
        head_path(args.head)  # is there
    if args.max_prompt + args.max_new_tokens > config.max_position:
        raise ValueError(
            f"--max-prompt {args.max_prompt} plus --max-new-tokens {args.max_new_tokens} exceeds the target's "
            f"{config.max_position} tokens of context: lower one of them"
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
    """Writes the shards of this process that are missing, waits for the others, and prints what came of all.

    Raises:
      ValueError: not one reply was written.
    """
    process, processes = jax.process_index(), jax.process_count()
    numbers = range(process, -(-len(chosen) // args.shard_rows), processes)
    shards = {number: Shard(args.out, number) for number in numbers}
    left = {number: shard for number, shard in shards.items() if not shard.whole}
    size = sum(len(chosen[number * args.shard_rows :][: args.shard_rows]) for number in left)
    progress = Progress(size, sum(len(shard.done) for shard in left.values()))
    if not left:
        logging.info("all rows are answered already")
    else:
        logging.info("%d rows, %d at once; the first batch waits for the compiler", size, writer.lanes)
    try:
        with logging_redirect_tqdm():
            for number, rows in read_shards(sources, chosen, args.shard_rows, left):
                write_shard(writer, args.temperatures, left[number], rows, progress)
    except KeyboardInterrupt:
        logging.info("stopped; the same command goes on from here")
        raise
    progress.close()
    report = add_reports(*(shard.report() for shard in shards.values()), {"shards": len(shards)})
    if processes > 1:
        # Not a collective: those give up after seconds, and one process may finish hours before another.
        ocp.multihost.sync_global_processes("regenerate", timeout=LONGEST_WAIT, processes=set(range(processes)))
    report = add_reports(*processes.everyones(report))
    speed = sum(processes.everyones(progress.speed))
    if not report["texts"]:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in report["skipped"].items())
        raise ValueError(f"no reply was written: {reasons}")
    if process == 0:
        tau = (report["reply_tokens"] - report["replies"]) / max(report.pop("cycles"), 1)
        extra = {"tau": round(tau, 3)} if writer.head is not None else {}
        extra |= {"tokens_per_second": round(speed, 1)} if speed else {}  # nothing was left to write
        print(json.dumps({**report, **extra, "out": str(args.out)}))


def survey(sources: Sequence[Source], tokenizer: Any) -> int:
    """Counts the rows, and refuses sources that have none, or among them none with a reply to be written.

    Raises:
      ValueError: naming the source, or the reasons.
    """
    total, usable, reasons = 0, False, collections.Counter[str]()
    for source in sources:
        if source.weight is not None:
            logging.info("%s: weights (@) are for training; every row is answered once", source.path)
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
            raise ValueError(f"{source.path} is empty")
    if not usable:
        found = "; ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        raise ValueError(f"no row has a reply to be written: {found}")
    return total


def choose(total: int, limit: int | None, seed: int) -> np.ndarray:
    """Row numbers in order: all, or `limit` of them drawn at random."""
    rows = np.arange(total)
    return rows if limit is None else np.sort(np.random.default_rng(seed).permutation(rows)[:limit])


def load(args: Args, config: DecoderConfig, tokenizer: Any, rows: int) -> Writer:
    """Loads target and head over this process's own devices."""
    devices = jax.local_devices()
    if len(devices) % args.tensor:
        raise ConfigError(f"--tensor {args.tensor} must divide the {len(devices)} devices of a process")
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
    sources: Sequence[Source], chosen: np.ndarray, size: int, wanted: Any
) -> Iterator[tuple[int, list[Numbered]]]:
    """The wanted shards, one after the other: number, and index, source and content of its rows."""
    if not wanted:
        return
    numbered = enumerate((source.path, row) for source in sources for row in source.rows())
    place, rows = 0, []
    for index, (path, row) in numbered:
        if index != chosen[place]:
            continue
        number, place = place // size, place + 1
        if number in wanted:
            rows.append((index, path, row))
        if place % size == 0 or place == len(chosen):
            if rows:
                yield number, rows
            rows = []
        if place == len(chosen):
            return


def write_shard(
    writer: Writer, temperatures: Sequence[float], shard: Shard, given: Sequence[Numbered], progress: Progress
) -> None:
    """Writes what is missing of a shard. A batch that is begun again is the same batch, for the sake of rounding."""
    rows: list[Row] = []
    refused: dict[int, str] = {}
    for index, source, row in given:
        try:
            rows.append(Row(index, source, Dialogue.begin(parse_row(row)), temperatures[index % len(temperatures)]))
        except SkippedRow as error:
            refused[index] = str(error)
    if set(refused) - shard.done:
        shard.append(list(refused), [], report_of(len(refused), skipped=dict(collections.Counter(refused.values()))))
        progress.add(len(refused), 0)
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
        progress.add(len(new), report["reply_tokens"])
    shard.finish()


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
