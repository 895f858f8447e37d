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
from infer.common.programs import at_least_one, not_negative, option_of, run
from train.loop.learners import NUM_HEADS, EagleLearner, MedusaLearner
from train.loop.options import HeadArgs as Args
from train.loop.setup import check_run
from train.loop.training import start

EAGLE3_ONLY = ("copy_layer", "fc_norm", "norm_output", "taps")
EAGLE_ONLY = (*EAGLE3_ONLY, "unroll", "token_loss", "eta", "token_weight", "feature_weight", "noise", "draft_vocab",
              "head_intermediate")  # fmt: skip
MEDUSA_ONLY = ("heads", "head_layers", "teacher")


def main(args: Args) -> int:
    """Trains and measures a head, writes it, and returns the exit status.

    Raises:
      ValueError: an option is out of range, or does not apply to the method; the message names it.
    """
    check_run(args)
    at_least_one(args, "unroll", "heads", "head_layers")
    not_negative(args, "draft_vocab", "decay", "eta", "token_weight", "feature_weight", "noise", "head_intermediate")
    if (args.decay or 0) > 1:
        raise ValueError(f"--decay must be at most 1, got {args.decay}. Give the weight of a step over the last.")
    many = args.method in NUM_HEADS
    names, methods = (EAGLE_ONLY, "eagle3, eagle1 or hass") if many else (MEDUSA_ONLY, "medusa, hydra or hydra++")
    rules = dict.fromkeys(names, methods)
    if args.method != "eagle3":
        rules |= dict.fromkeys(EAGLE3_ONLY, "eagle3")
    for field in dataclasses.fields(args):
        if field.name in rules and getattr(args, field.name) != field.default:
            raise ValueError(
                f"{option_of(field.name)} must come with --method {rules[field.name]}, got {args.method}. Leave it out."
            )
    if args.eta is not None and args.token_loss != "lk_blend":
        raise ValueError(f"--eta must come with --token-loss lk_blend, got {args.token_loss}. Leave it out.")
    return start(args, MedusaLearner(args) if many else EagleLearner(args))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
