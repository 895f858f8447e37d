"""Trains a draft head on a frozen target.

    python -m train.head --config configs/tiny_cpu.yaml
    python -m train.head --config configs/llama31_8b.yaml --steps 2000 --out runs/mine

`--method` selects head and objective of a paper: eagle3, eagle1, hass, medusa, hydra, hydra++. Data are conversations:
JSONL, Parquet, or datasets of the hub (`eagle_jax.data.corpus.sources`). On a TPU pod every host runs the same command.
A stopped run continues when the same command is given again. `--out` holds checkpoints (`latest/`, `best/`), `head/`
(official layout; the best by tau), `log.jsonl` and `tensorboard/`. The last line of output is one JSON object.
"""

from __future__ import annotations

import dataclasses

from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, not_negative, run
from train.loop.learners import NUM_HEADS, EagleLearner, MedusaLearner
from train.loop.options import HeadArgs as Args
from train.loop.setup import check_run
from train.loop.training import start

EAGLE3_ONLY = ("fc_norm", "norm_output", "taps")
EAGLE_ONLY = (*EAGLE3_ONLY, "unroll", "token_loss", "eta", "token_weight", "feature_weight", "noise", "draft_vocab",
              "head_intermediate")  # fmt: skip
MEDUSA_ONLY = ("heads", "head_layers", "teacher")


def check(args: Args) -> None:
    """Validates the options.

    Raises:
      ValueError: naming the option.
    """
    check_run(args)
    at_least_one(args, "unroll", "heads", "head_layers")
    not_negative(args, "draft_vocab", "decay", "eta", "token_weight", "feature_weight", "noise", "head_intermediate")
    if (args.decay or 0) > 1:
        raise ValueError(f"--decay must be at most 1, got {args.decay}. Give the weight of a step over the last.")
    if args.method in NUM_HEADS:
        rules = [(name, "eagle3, eagle1 or hass") for name in EAGLE_ONLY]
    else:
        rules = [(name, "medusa, hydra or hydra++") for name in MEDUSA_ONLY]
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    rules += [] if args.method == "eagle3" else [(name, "eagle3") for name in EAGLE3_ONLY]
    for name, methods in rules:
        if getattr(args, name) != defaults[name]:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must come with --method {methods}, got {args.method}. Leave it out.")
    if args.eta is not None and args.token_loss != "lk_blend":
        raise ValueError(f"--eta must come with --token-loss lk_blend, got {args.token_loss}. Leave it out.")


def main(args: Args) -> int:
    """Trains and measures a head, writes it, and returns the exit status."""
    check(args)
    return start(args, MedusaLearner(args) if args.method in NUM_HEADS else EagleLearner(args))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
