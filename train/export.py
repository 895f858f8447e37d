"""Writes a trained draft head in the layout that another engine serves.

    python -m train.export --to sglang --head runs/llama/head --target meta-llama/Llama-3.1-8B-Instruct --out head
    python -m train.export --to speculators --head demo --out runs/demo-speculators

`official` is the layout of the reference implementation (EAGLE-1/2 and EAGLE-3), `speculators` that of vLLM's package
of this name, `sglang` the raw one of SGLang, vLLM and sglang-jax; `docs/export.md` says which engine wants which, and
how to serve it. No tokenizer is written: every engine takes the target's. The last line printed is one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Literal

from eagle_jax.assets import DEMO
from eagle_jax.checkpoints import (
    carries_embedding,
    check_unoccupied,
    checkpoint_directory,
    config_directory,
    export_head,
    load_head_checkpoint,
    read_target_config,
    read_target_embedding,
    share_embedding,
    stored_dtype,
)
from infer.common.programs import at_least_one, naming, run
from train.loop.places import head_path, target_of_head, target_path


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program.

    Attributes:
      to: the layout.
      head: a head's directory (of a run of `train.head`: OUT/head) or hub id, or "demo" for the bundled EAGLE-3 head.
      out: directory to write; it appears whole or not at all.
      target: directory or hub id of the head's target, or "demo"; its vocabulary, context length and RoPE are written.
        A head of `train.head` knows its own.
      verifier: what a speculators config names as the target; --target unless given (a directory by its full path).
      speculative_tokens: length of the chain that vLLM drafts with a speculators config.
      dtype: of the weights; as stored unless given.
      rope: whose RoPE is written where the head's is not the target's: the head's drafts as it does here.
      embedding: carry a copy of the target's embedding; EAGLE-1/2 and speculators files always do, others need none.
      overwrite: replace a checkpoint in --out; files beside it are kept.
    """

    to: Literal["official", "speculators", "sglang"]
    head: str
    out: Path
    target: str | None = None
    verifier: str | None = None
    speculative_tokens: int = 5
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    rope: Literal["head", "target"] | None = None
    embedding: bool = False
    overwrite: bool = False


def main(args: Args) -> None:
    """Reads the head, checks that the layout can express it, and writes."""
    at_least_one(args, "speculative_tokens")
    if args.to != "speculators" and args.verifier is not None:
        raise ValueError(f"--verifier is for --to speculators: a config of layout {args.to} does not name its target")
    head, target = _places(args)
    if not args.overwrite:
        check_unoccupied(args.out)
    with naming("--target", target):
        target_directory = config_directory(target)
        target_config = read_target_config(target_directory)
    if args.out.expanduser().resolve() == target_directory.resolve():
        raise ValueError(f"--out {args.out} is the target itself")
    with naming("--head", args.head):
        head_directory = checkpoint_directory(head)
        dtype = args.dtype or stored_dtype(head_directory)
        config, params = load_head_checkpoint(head_directory, target_config, dtype)
    wanted = args.embedding or carries_embedding(config, args.to)
    same_width = config.layer.hidden_size == target_config.hidden_size
    embedding = None
    # The target's weights, which may be a long download, are read only where its embedding is needed.
    if (wanted and not config.own_embedding) or (args.to == "sglang" and config.own_embedding and same_width):
        embedding = read_target_embedding(checkpoint_directory(target), dtype)
        config, params = share_embedding(config, params, embedding)
    local = Path(target).expanduser().is_dir()
    written = export_head(
        config,
        params,
        target_config,
        args.out,
        args.to,
        dtype,
        rope=args.rope,
        verifier=args.verifier or (str(target_directory.resolve()) if local else target),
        speculative_tokens=args.speculative_tokens,
        embedding=embedding if wanted else None,
        overwrite=args.overwrite,
    )
    weights = sum(path.stat().st_size for path in args.out.expanduser().glob("*.safetensors"))
    logging.info("%s: %s, %.1f MB, taps %s", args.out, args.to, weights / 1e6, written.taps)
    print(json.dumps({"out": str(args.out), "to": args.to, "head": head, "dtype": dtype, "bytes": weights}))


def _places(args: Args) -> tuple[str, str]:
    """Where the head and its target are.

    Raises:
      ValueError: the target of a head of one's own is not given.
    """
    if args.head != DEMO:
        head = head_path(args.head)
        target = args.target or target_of_head(head)
        if target is None:
            raise ValueError(
                f"--target is missing: the exported config takes vocabulary, RoPE and context length from the model "
                f"that {args.head} was trained for"
            )
        return head, target_path(target)
    if args.target not in (None, DEMO):
        raise ValueError("--target is not for --head demo, which goes with the bundled target")
    return head_path(DEMO, part="eagle3"), target_path(DEMO)


if __name__ == "__main__":
    run(main, Args, __doc__, log="plain")
