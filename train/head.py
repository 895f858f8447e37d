"""Trains a draft head on a frozen target.

    python -m train.head --config configs/tiny_cpu.yaml
    python -m train.head --config configs/llama31_8b.yaml --steps 2000 --out runs/mine

`--method` chooses the papers' head and objective (eagle3, eagle1, hass, medusa, hydra, hydra++); every number of it can
be set. Data are conversations
(JSONL, Parquet, datasets of the hub), see `eagle_jax.data.corpus.sources`. Several processes, as on a TPU pod, run the same
command. A run that was stopped goes on where it was when the same command is given again. `--out` holds checkpoints
(`latest/`, `best/`), `head/` (official layout; the best by tau), `log.jsonl` and `figure.png`. The last line printed is
one JSON object.
"""

from __future__ import annotations

import dataclasses

from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, not_negative, run
from train.loop.learners import NUM_HEADS, learner_of
from train.loop.options import HeadArgs, check_run
from train.loop.training import start

Args = HeadArgs
RATES = {"eagle1": 3e-5, "hass": 3e-5, "medusa": 1e-3, "hydra": 5e-4, "hydra++": 5e-4}
"""Peak learning rates of the methods' authors; EAGLE-3's is 1e-4."""


EAGLE_ONLY = ("unroll", "token_loss", "eta", "token_weight", "feature_weight", "noise", "taps", "fc_norm",
              "norm_output", "draft_vocab", "head_intermediate")  # fmt: skip
MEDUSA_ONLY = ("heads", "head_layers", "teacher")


def check(args: Args) -> None:
    """Refuses numbers that cannot be meant.

    Raises:
      ValueError: naming the option.
    """
    check_run(args)
    at_least_one(args, "unroll", "heads", "head_layers")
    not_negative(args, "draft_vocab", "decay", "eta", "token_weight", "feature_weight", "noise", "head_intermediate")
    if (args.decay or 0) > 1:
        raise ValueError(f"--decay {args.decay} must be at most 1: it is the weight of each step over the one before")
    medusa = args.method in NUM_HEADS
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    for name in EAGLE_ONLY if medusa else MEDUSA_ONLY:
        if getattr(args, name) != defaults[name]:
            kinds = "eagle3, eagle1 and hass" if medusa else "medusa, hydra and hydra++"
            raise ValueError(f"--{name.replace('_', '-')} is of {kinds}, and --method is {args.method}")
    if args.method != "eagle3":
        for name in ("fc_norm", "norm_output", "taps"):
            if getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} is of --method eagle3, and the method is {args.method}")
    if args.eta is not None and args.token_loss != "lk_blend":
        raise ValueError("--eta is of --token-loss lk_blend")


def main(args: Args) -> int:
    """Trains, measures, writes the head."""
    check(args)
    if args.rate is None:
        args = dataclasses.replace(args, rate=RATES.get(args.method, 1e-4))
    return start(args, learner_of(args))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
