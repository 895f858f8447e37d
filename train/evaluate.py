"""Measures tau and acceptance of a head or draft model on held-out prompts.

    python -m train.evaluate --target runs/target/checkpoint --head runs/eagle3/head --heldout heldout.jsonl
    python -m train.evaluate --target demo --head demo --heldout "runs/data/heldout/*.jsonl"
    python -m train.evaluate --target demo --head runs/small --kind draft_model --tree 5,1,5 --heldout heldout.jsonl

Prompts are the conversations up to the first reply. Take rows that no training run reads. The output has:

- `tau`: tokens per target pass with the tree.
- `n_alpha`: acceptance rate of a draft that follows n accepted drafts of a chain, n = 0..5.

Logs one line per measurement. The last line of output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any, Literal

import jax

import eagle_jax
from eagle_jax.data.chat import with_stop_ids
from eagle_jax.data.corpus import prompts_by_source
from eagle_jax.evaluate import measure_n_alpha
from eagle_jax.runtime.compilation import use_compilation_cache
from eagle_jax.runtime.drafters import TreeDrafter
from infer.common.programs import at_least_one, check_seed, naming, not_negative, parse_tree, run
from train.loop.options import TargetArgs
from train.loop.places import head_path, read_target, sources_of, target_config, tokenizer_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Args(TargetArgs):
    """Options of the program."""

    head: str  # path or hub id of its head, or "demo"
    heldout: tuple[str, ...]  # sources `path[#split]` of conversations; every file of a glob is a source
    kind: Literal["eagle", "medusa", "draft_model"] = "eagle"  # eagle, medusa (and Hydra) or draft_model
    prompts: int = 24  # number per source, decoded as one batch
    max_new_tokens: int = 128  # per reply
    max_prompt: int = 128  # longest prompt; longer ones are left out
    tree: str = "6,10,59"  # depth,top_k,num_nodes
    # how candidates are ranked at temperature > 0 (TreeConfig)
    sampled_ranking: Literal["draw", "law", "untempered"] = "draw"
    temperatures: tuple[float, ...] = (0.0, 1.0)  # measured one after the other
    seed: int = 0  # seed of the draws
    compare: bool = True  # count replies that are identical to plain decoding
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and activations


def main(args: Args) -> None:
    """Measures every source at every temperature."""
    at_least_one(args, "prompts", "max_new_tokens", "max_prompt")
    not_negative(args, "temperatures")
    check_seed(args)
    tree = dataclasses.replace(parse_tree(args.tree), sampled_ranking=args.sampled_ranking)
    load: Any
    part, load = {
        "eagle": ("hass", eagle_jax.load_drafter),
        "medusa": ("medusa", eagle_jax.load_medusa),
        "draft_model": ("small", eagle_jax.load_draft_model),
    }[args.kind]
    config, head_at = target_config(args.target), head_path(args.head, part=part)
    sources_of(args.heldout, "--heldout")  # raises if a file is missing
    tokenizer = tokenizer_of(args, config)
    prompts_of = prompts_by_source(args.heldout, tokenizer, args.prompts, args.max_prompt)
    target = with_stop_ids(read_target(args), tokenizer)
    with naming("--head", args.head):
        head: TreeDrafter = load(head_at, target, tree)
    results: list[dict[str, Any]] = []
    for name, prompts in prompts_of.items():
        if not prompts:
            logging.info("%s: no prompt of at most --max-prompt %d tokens, left out", name, args.max_prompt)
            continue
        for temperature in args.temperatures:
            logging.info("%s: %d prompts at temperature %g ...", name, len(prompts), temperature)
            results.append({"prompts": Path(name).stem, **measure(args, target, head, prompts, temperature)})
            logging.info("%s", json.dumps(results[-1]))
    settings = {name: getattr(args, name) for name in ("head", "weights", "tree", "sampled_ranking")}
    print(json.dumps(settings | {"results": results}))


def measure(
    args: Args, target: eagle_jax.Target, head: TreeDrafter, prompts: list[list[int]], temperature: float
) -> dict[str, Any]:
    """Measures one source at one temperature."""
    options: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": temperature}
    options["key"] = jax.random.key(args.seed)
    found = eagle_jax.generate(target, head, prompts, **options)
    chains = measure_n_alpha(target, head, prompts, **options)
    record: dict[str, Any] = {"temperature": temperature, "tau": round(found.tau, 3)}
    record["n_alpha"] = [None if rate is None else round(rate, 3) for rate in chains.alpha]
    record |= {"replies": len(prompts), "tokens": sum(map(len, found.tokens)), "cycles": int(found.cycles.sum())}
    if args.compare:
        plain = eagle_jax.generate(target, None, prompts, **options).tokens
        same = sum(a == b for a, b in zip(found.tokens, plain, strict=True))
        record["identical"] = f"{same}/{len(prompts)}"
    return record


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
