"""Lets the target write the replies that a draft head is trained on, as the papers do.

    python -m train.regenerate --target runs/target/checkpoint --corpus runs/data/train.npz --out runs/regenerated.npz

Prompts are drawn from the chat turns of the corpus; the temperatures take turns, batch by batch. With `--head`, an
earlier head speeds the writing up; the replies are the same.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path

import jax
import numpy as np

import eagle_jax
from eagle_jax.data.corpus import Corpus
from eagle_jax.programs import at_least_one, parse_tree, run


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      target: checkpoint of the target.
      corpus: .npz of `train.data`.
      out: .npz to write.
      head: a head that drafts (None: plain decoding).
      tree: depth,top_k,num_nodes of its drafts.
      documents: prompts to answer.
      batch: prompts at once.
      max_new_tokens: longest reply.
      max_prompt: longer prompts are left out.
      temperatures: take turns.
      minutes: wall-clock budget, after which what is there is written.
      seed: of the choice and of sampling.
    """

    target: Path
    corpus: Path
    out: Path
    head: Path | None = None
    tree: str = "3,2,5"
    documents: int = 4096
    batch: int = 64
    max_new_tokens: int = 160
    max_prompt: int = 128
    temperatures: tuple[float, ...] = (0.0, 1.0)
    minutes: float = 30.0
    seed: int = 0


def main(args: Args) -> None:
    """Generates batch after batch and writes one corpus."""
    at_least_one(args, "documents", "batch", "max_new_tokens", "max_prompt")
    corpus = Corpus.load(args.corpus)
    target = eagle_jax.load_target(args.target)
    drafter = None
    if args.head is not None:
        drafter = eagle_jax.load_drafter(args.head, target, tree=parse_tree(args.tree))
    rng = np.random.default_rng(args.seed)
    usable = np.flatnonzero((corpus.prompts > 0) & (corpus.prompts <= args.max_prompt))
    chosen = rng.permutation(usable)[: args.documents]
    # Not sorted by length: nearly every batch then falls into the same bucket, and one compilation serves them all.
    if len(chosen) < args.batch:
        raise ValueError(
            f"{args.corpus} has {len(usable)} prompts of at most {args.max_prompt} tokens and --documents takes "
            f"{len(chosen)} of them, too few for one --batch {args.batch}: lower --batch"
        )
    batches = [chosen[i : i + args.batch] for i in range(0, len(chosen) - args.batch + 1, args.batch)]
    rows: list[list[int]] = []
    prompts: list[int] = []
    source: list[int] = []
    written, start = 0, time.time()
    for count, batch in enumerate(batches, 1):
        texts = [corpus.document(i)[: corpus.prompts[i]].tolist() for i in batch.tolist()]
        out = eagle_jax.generate(
            target,
            drafter,
            texts,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperatures[count % len(args.temperatures)],
            key=jax.random.key(args.seed + count),
        )
        for document, text, reply in zip(batch.tolist(), texts, out.tokens, strict=True):
            rows.append(text + reply)
            prompts.append(len(text))
            source.append(int(corpus.source[document]))
            written += len(reply)
        minutes = (time.time() - start) / 60
        if count % 8 == 0 or count == len(batches):
            record = {"batches": count, "of": len(batches), "reply_tokens": written, "minutes": round(minutes, 2)}
            logging.info("%s", json.dumps(record))
        if minutes > args.minutes:
            logging.info("stopped by --minutes after %d of %d batches", count, len(batches))
            break
    Corpus.from_rows(rows, prompts, source).save(args.out)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(main, Args, __doc__)
