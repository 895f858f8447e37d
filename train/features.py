"""Writes the target's hidden states of a corpus, so that training a head does not run the target.

    python -m train.features --target MODEL --data chats/*.jsonl --out runs/features
    python -m train.head --features runs/features --target MODEL --data chats/*.jsonl --out runs/head

Logs the size first, and stops if the disk is too small. The same command given again writes only the missing shards.
Runs in one process; `--tensor` spreads the target over its devices.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

import eagle_jax
from eagle_jax.checkpoints import sweep
from eagle_jax.data.corpus import Corpus, Layout, Stored, build_corpus, corpus_key, shard_bounds, write_shard
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import make_mesh, processes
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.runtime.request import bucket
from eagle_jax.training import observe
from infer.common.programs import at_least_one, run
from train.loop.log import progress_bar
from train.loop.options import CorpusArgs
from train.loop.places import alone_in, read_target, sources_of, tokenizer_of
from train.loop.setup import taps_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(CorpusArgs):
    """Options of the program; `--data` as in the training run, in the same order."""

    # hidden states that the head reads; default 2, L/2 and L-3. An EAGLE-1 head reads the last, L
    taps: tuple[int, ...] | None = None
    stored: Stored = "bfloat16"  # bfloat16, float16, or float8 (half the space, with a scale per token and state)
    length: int = 2048  # longest document; longer ones are cut
    shard_tokens: int = 1_000_000  # approximate tokens per file
    rows: int = 8  # documents per batch
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # dtype of the target's weights
    tensor: int = 1  # devices that the target is spread over


def check_space(layout: Layout, tokens: int, out: Path) -> None:
    """Logs the size of the features and checks that the disk holds them.

    Raises:
      ValueError: the disk is too small.
    """
    sweep(out)  # partial shards of a killed run
    size, free = tokens * layout.token_bytes, shutil.disk_usage(out).free
    have = sum(path.stat().st_size for path in out.glob("features-*.npy"))
    logging.info("%d tokens of %d bytes: %.2f GB in %d files; %.2f GB exist, %.2f GB are free", tokens,
                 layout.token_bytes, size / 1e9, layout.shards, have / 1e9, free / 1e9)  # fmt: skip
    if size - have > free:
        raise ValueError(
            f"--out must have {(size - have) / 1e9:.2f} GB free, got {free / 1e9:.2f} GB in {out}. Choose --stored "
            "float8, fewer --data, or another disk."
        )


def main(args: Args) -> None:
    """Loads the target and writes its features.

    Raises:
      ValueError: `out` holds other features, or the disk is too small.
    """
    at_least_one(args, "length", "shard_tokens", "rows", "tensor")
    mesh = make_mesh(1, args.tensor) if args.tensor > 1 else None
    sources = sources_of(args.data)
    with alone_in(args.out, ("data", "layout.json"), "a directory of train.features"):
        target = read_target(args, mesh)
        taps = taps_of(args.taps, target.config.num_layers)
        tokenizer = tokenizer_of(args, target.config)
        key = corpus_key(sources, tokenizer)
        corpus, _ = build_corpus(sources, tokenizer, args.out / "data", key=key, vocab_size=target.config.vocab_size)
        weights, ends = (processes.fingerprint(target.params, target.config, layers) for layers in (True, False))
        layout = Layout(
            key, args.target, weights, ends,
            args.dtype, taps, target.config.hidden_size, args.stored, args.length,
            shard_bounds(corpus, args.length, args.shard_tokens), args.weights,
        )  # fmt: skip
        begun = any(args.out.glob("features-*.npy"))
        if begun and not ((args.out / "layout.json").is_file() and Layout.load(args.out) == layout):
            raise ValueError(f"--out must hold features of this call's data, weights and options, got {args.out} with "
                             "others. Choose another directory.")  # fmt: skip
        tokens = int(corpus.starts_within(args.length)[-1])
        check_space(layout, tokens, args.out)
        layout.save(args.out)
        write(args, target, corpus, layout)
        print(json.dumps({"documents": len(corpus), "tokens": tokens, "shards": layout.shards,
                          "bytes": tokens * layout.token_bytes, "out": str(args.out)}))  # fmt: skip


def write(args: Args, target: eagle_jax.Target, corpus: Corpus, layout: Layout) -> None:
    """Writes the missing shards."""
    starts = corpus.starts_within(args.length)
    lengths = np.diff(starts)
    forward = jax.jit(functools.partial(observe, target.config, taps=layout.taps))
    whole = [shard for shard in range(layout.shards) if layout.path(args.out, shard).exists()]
    bar = progress_bar(len(corpus), sum(layout.bounds[i + 1] - layout.bounds[i] for i in whole), "documents")
    for shard in (i for i in range(layout.shards) if i not in whole):
        first, last = layout.bounds[shard], layout.bounds[shard + 1]
        # Sorted by length: a batch is as wide as its longest document.
        documents = first + np.argsort(lengths[first:last], kind="stable")

        def fill(put: Callable[[Any, Any], None], documents: np.ndarray = documents, first: int = first) -> None:
            for at in range(0, len(documents), args.rows):
                part = documents[at : at + args.rows]
                width = min(args.length, bucket(int(lengths[part].max())))
                found = forward(target.params, _texts(corpus, part, width, args.rows))
                states = np.concatenate([np.asarray(found.features), np.asarray(found.hidden)], axis=-1)
                states = states.reshape(*states.shape[:2], layout.parts, layout.hidden)
                for row, document in enumerate(part.tolist()):
                    begin, end = starts[document] - starts[first], starts[document + 1] - starts[first]
                    put(slice(begin, end), states[row, : end - begin])
                bar.update(len(part))

        write_shard(layout, args.out, shard, int(starts[last] - starts[first]), fill)
    bar.close()


def _texts(corpus: Corpus, documents: np.ndarray, length: int, rows: int) -> PackedTokens:
    """Returns one document per row, cut at `length`; the last batch of a shard is filled with empty rows."""
    shape = (rows, length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    for row, document in enumerate(documents.tolist()):
        text = corpus[document].tokens[:length]
        tokens[row, : len(text)] = text
        segments[row, : len(text)] = 1
    arrays: Any = (tokens, segments > 0, segments, np.broadcast_to(np.arange(length, dtype=np.int32), shape))
    return PackedTokens(*arrays)


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
