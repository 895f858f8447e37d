"""Measures tau of a head on held-out prompts: tokens per target pass, per kind of prompt and temperature.

    python -m train.evaluate --target runs/target/checkpoint --head runs/eagle3 --heldout runs/data/heldout.npz

The prompts are of the split that no program here trains on. `mass` is what no head can change: the average probability
that the target gives to its 1, 2, 3, ... best tokens where it writes, at that temperature. Prints one line per
measurement and, last, one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax.config import DecoderConfig
from eagle_jax.programs import at_least_one, parse_tree, run
from eagle_jax.request import bucket
from eagle_jax.data.corpus import SOURCES, Corpus
from eagle_jax.training.step import observe
from eagle_jax.types import Params


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      target: checkpoint of the model.
      head: checkpoint of its head.
      heldout: .npz of `train.data`.
      prompts: per kind, decoded as one batch.
      max_new_tokens: per reply.
      max_prompt: longer prompts are left out.
      tree: depth,top_k,num_nodes.
      sampled_ranking: what the head ranks its candidates by at temperature > 0 (TreeConfig).
      temperatures: each is measured.
      seed: of the draws.
      compare: decode plainly as well and count identical replies.
    """

    target: Path
    head: Path
    heldout: Path
    prompts: int = 24
    max_new_tokens: int = 128
    max_prompt: int = 128
    tree: str = "6,10,59"
    sampled_ranking: Literal["draw", "law", "untempered"] = "draw"
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seed: int = 0
    compare: bool = True


def main(args: Args) -> None:
    """Measures and prints."""
    at_least_one(args, "prompts", "max_new_tokens", "max_prompt")
    corpus = Corpus.load(args.heldout)
    target = eagle_jax.load_target(args.target)
    tree = dataclasses.replace(parse_tree(args.tree), sampled_ranking=args.sampled_ranking)
    drafter = eagle_jax.load_drafter(args.head, target, tree=tree)

    def decode(
        head: eagle_jax.DraftHead | None, prompts: list[list[int]], temperature: float
    ) -> eagle_jax.GenerateOutput:
        key = jax.random.key(args.seed)
        return eagle_jax.generate(
            target, head, prompts, max_new_tokens=args.max_new_tokens, temperature=temperature, key=key
        )

    results: list[dict[str, object]] = []
    for source, name in enumerate(SOURCES):
        usable = (corpus.source == source) & (corpus.prompts > 0) & (corpus.prompts <= args.max_prompt)
        chosen = np.flatnonzero(usable)[: args.prompts].tolist()
        if not chosen:
            continue
        prompts = [corpus.document(i)[: corpus.prompts[i]].tolist() for i in chosen]
        for temperature in args.temperatures:
            out = decode(drafter, prompts, temperature)
            record: dict[str, object] = {"prompts": name, "temperature": temperature, "tau": round(out.tau, 3)}
            if temperature > 0:
                record["mass"] = mass(target, prompts, out.tokens, temperature)
            record |= {"replies": len(prompts), "tokens": sum(map(len, out.tokens)), "cycles": int(out.cycles.sum())}
            if args.compare:
                same = sum(a == b for a, b in zip(out.tokens, decode(None, prompts, temperature).tokens, strict=True))
                record["identical"] = f"{same}/{len(prompts)}"
            results.append(record)
            logging.info("%s", json.dumps(record))
    if not results:
        raise ValueError(f"{args.heldout} has no prompt of at most --max-prompt {args.max_prompt} tokens")
    report = {"head": str(args.head), "tree": args.tree, "sampled_ranking": args.sampled_ranking, "results": results}
    print(json.dumps(report))


def mass(
    target: eagle_jax.Target, prompts: list[list[int]], replies: list[list[int]], temperature: float, best: int = 4
) -> list[float]:
    """Average probability of the target's 1..`best` likeliest tokens at every position of its replies."""
    texts = [prompt + reply for prompt, reply in zip(prompts, replies, strict=True)]
    tokens = np.zeros((len(texts), bucket(max(map(len, texts)))), np.int32)
    written = np.zeros(tokens.shape, bool)  # positions whose next token is the target's own
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        tokens[row, : len(text)] = text
        written[row, len(prompt) - 1 : len(text) - 1] = True
    found = np.asarray(_mass(target.config, target.params, jnp.asarray(tokens), temperature, best))
    return found[written].mean(axis=0, dtype=np.float64).round(4).tolist()


@functools.partial(jax.jit, static_argnums=(0, 4))
def _mass(config: DecoderConfig, params: Params, tokens: jax.Array, temperature: float, best: int) -> jax.Array:
    law = observe(config, params, tokens, jnp.ones(tokens.shape, bool), (), None).law
    # The law at temperature 1 is known: its powers, normalised, are those at other temperatures.
    law = jax.nn.softmax(jnp.log(law) / temperature)
    return jnp.cumsum(jax.lax.top_k(law, best)[0], axis=-1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    run(main, Args, __doc__)
