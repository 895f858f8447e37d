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
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm.contrib.logging import logging_redirect_tqdm

import eagle_jax
from eagle_jax.config import ConfigError, DecoderConfig, TreeConfig
from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.stops import stop_ids
from eagle_jax.data.chat.tokenizers import tokenizer_settings
from eagle_jax.data.corpus.shards import Shard, add_reports, remember
from eagle_jax.data.corpus.sources import Source, corpus_key
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import parse_row
from eagle_jax.parallel import processes
from eagle_jax.parallel.mesh import make_mesh
from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, check_seed, naming, not_negative, parse_tree, run
from train.loop.dialogues import Row, Writer, report_of
from train.loop.options import RegenerateArgs as Args
from train.loop.places import alone_in, head_path, sources_of, target_config, target_path, tokenizer_of
from train.loop.progress import progress_bar

LONGEST_WAIT = 7 * 24 * 3600
"""Seconds that a process waits for the others to finish their shards."""
MAY_CHANGE = ("out", "head", "tree", "batch", "tensor", "chat_template")
"""Options that may differ when a run resumes: the output is the same. The template's text is compared, not its path."""


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
    sources = sources_of(args.data)
    tree = parse_tree(args.tree)
    config = target_config(args.target)
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
        contents = {
            "contents of data": corpus_key(sources, tokenizer),
            **tokenizer_settings(tokenizer),
            "stop tokens": writer.stops,
            "weights": processes.fingerprint(writer.target.params),
        }
        remember(args.out, {**settings, **contents})
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
        # Not a collective: those time out after seconds, and one process may finish hours before another.
        ocp.multihost.sync_global_processes("regenerate", timeout=LONGEST_WAIT, processes=set(range(count)))
    report = add_reports(*processes.gather_values(report))
    if not report["texts"]:
        raise ValueError(f"--data must get a reply, got none: {_listed(report['skipped'])}. Mend the rows or options.")
    if process == 0:
        tau = (report["reply_tokens"] - report["replies"]) / max(report.pop("cycles"), 1)
        extra = {} if writer.head is None else {"tau": round(tau, 3)}
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
    with naming("--target", args.target):
        target = eagle_jax.load_target(target_path(args.target), args.dtype, mesh=mesh)
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
        found = [(row, *answer) for row, answer in zip(batch, writer.converse(batch), strict=True)]
        new = [entry for entry in found if entry[0].number not in shard.done]  # all, unless --batch has changed
        texts = [
            {"row": row.number, "source": row.source, **text.as_row(), "temperature": row.temperature}
            for row, dialogue, _ in new
            for text in dialogue.texts
        ]
        shard.append([row.number for row, _, _ in new], texts, add_reports(*(report for _, _, report in new)))
        bar.update(len(new))
    shard.finish()


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
