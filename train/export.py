"""Exports a trained draft head in the layout of another engine.

    python -m train.export --to sglang --head runs/llama/head --target meta-llama/Llama-3.1-8B-Instruct --out head
    python -m train.export --to speculators --head demo --out runs/demo-speculators

Layouts: `official` is the reference implementation's (EAGLE-1/2 and EAGLE-3). `speculators` is that of vLLM's package
of this name. `sglang` is for SGLang, vLLM and sglang-jax. `docs/export.md` describes how to serve each. No tokenizer
is written: engines use the target's. The last line of output is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Literal

from eagle_jax.assets import PAIRS
from eagle_jax.checkpoints import (
    carries_embedding,
    checkpoint_directory,
    config_directory,
    export_head,
    is_gguf,
    load_head_checkpoint,
    load_target_checkpoint,
    read_target_config,
    stored_dtype,
)
from eagle_jax.models.quantised import dequantise
from infer.common.programs import at_least_one, naming, run
from train.loop.places import head_path, target_of_head, target_path


@dataclasses.dataclass(frozen=True)
class Args:
    """Options of the program."""

    to: Literal["official", "speculators", "sglang"]  # layout
    head: str  # directory of a head or of a run of `train.head`, hub id, "demo" or "smollm2"
    out: Path  # directory to write; it appears whole or not at all
    # directory, GGUF file or hub id of the head's target, "demo" or "smollm2". Its vocabulary, context length and RoPE
    # are written. A head of `train.head` stores its target
    target: str | None = None
    # name of the target in a speculators config; default --target (a directory by its full path)
    verifier: str | None = None
    speculative_tokens: int = 5  # length of the chain that vLLM drafts with a speculators config
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # dtype of the weights; default as stored
    # whose RoPE is written if head and target differ; "head" drafts as this library does
    rope: Literal["head", "target"] | None = None
    # include the target's embedding; EAGLE-1/2 and speculators files always have it, others need none
    embedding: bool = False
    overwrite: bool = False  # replace a checkpoint in --out; other files stay


def main(args: Args) -> None:
    """Reads a head, checks that the layout can express it, and writes it."""
    at_least_one(args, "speculative_tokens")
    if args.to != "speculators" and args.verifier is not None:
        raise ValueError(f"--verifier must come with --to speculators, got {args.to}. Leave it out.")
    if args.verifier is not None and args.verifier[:1] in "/.~" and not Path(args.verifier).expanduser().exists():
        raise ValueError(
            f"--verifier must be a directory or hub id, got {args.verifier}, which does not exist. Correct it."
        )
    head = head_path(args.head, part="eagle3")
    named = args.target or (args.head if args.head in PAIRS else target_of_head(head))
    if named is None:
        raise ValueError(
            f"--target must name the model that {args.head} was trained for, got none. Give it: the exported config "
            "takes its vocabulary, RoPE and context length."
        )
    target = target_path(named)
    out = args.out.expanduser()
    if not args.overwrite and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out must be missing or an empty directory, got {out}. Give another, or pass --overwrite.")
    with naming("--target", target):
        target_directory = config_directory(target)
        target_config = read_target_config(target_directory)
    if out.resolve() == target_directory.resolve():
        raise ValueError(f"--out must not be the target's directory, got {args.out}. Choose another.")
    with naming("--head", args.head):
        head_directory = checkpoint_directory(head)
        dtype = args.dtype or stored_dtype(head_directory)
        config, params = load_head_checkpoint(head_directory, target_config, dtype)
    wanted = args.embedding or carries_embedding(config, args.to)
    same_width = config.layer.hidden_size == target_config.hidden_size
    embedding = None
    # Reads the target's weights, possibly a long download, only if the embedding is needed.
    if (wanted and not config.own_embedding) or (args.to == "sglang" and config.own_embedding and same_width):
        embedding = dequantise(load_target_checkpoint(target, dtype, layers=False)[1]["embed_tokens"]["embedding"])
        config, params = load_head_checkpoint(head_directory, target_config, dtype, embedding=embedding)
    full_name = str(target_directory.resolve()) if Path(target).expanduser().exists() else target
    export_head(
        config, params, target_config, args.out, args.to, dtype, rope=args.rope, verifier=args.verifier or full_name,
        speculative_tokens=args.speculative_tokens, embedding=embedding if wanted else None,
    )  # fmt: skip
    if args.to == "speculators" and args.verifier is None and is_gguf(Path(full_name)):
        logging.warning("The config names %s, and vLLM needs a directory: convert it, and pass --verifier.", full_name)
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(json.dumps({"out": str(args.out), "to": args.to, "head": head, "dtype": dtype, "bytes": weights}))


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
