"""Trains a draft head on a frozen target.

    python -m train.head --config configs/tiny_cpu.yaml
    python -m train.head --config configs/llama31_8b.yaml --steps 2000 --out runs/mine

`--method` chooses the papers' head and objective (eagle3, eagle1, hass, medusa, hydra, hydra++); every number of it can
be set. Data are conversations
(JSONL, Parquet, datasets of the hub), see `eagle_jax.data.sources`. Several processes, as on a TPU pod, run the same
command. A run that was stopped goes on where it was when the same command is given again. `--out` holds checkpoints
(`latest/`, `best/`), `head/` (official layout; the best by tau), `log.jsonl` and `figure.png`. The last line printed is
one JSON object.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, not_negative, run
from train.loop.learners import NUM_HEADS, learner_of
from train.loop.options import RunArgs, check_run
from train.loop.training import start

RATES = {"eagle1": 3e-5, "hass": 3e-5, "medusa": 1e-3, "hydra": 5e-4, "hydra++": 5e-4}
"""Peak learning rates of the methods' authors; EAGLE-3's is 1e-4."""


@dataclasses.dataclass(frozen=True)
class Args(RunArgs):
    """Arguments of the program; None takes the method's own value.

    Attributes:
      method: objective and kind of head.
      unroll: steps of an EAGLE head on its own outputs; eagle3 7, hass 3, eagle1 1.
      decay: weight of each step (Medusa's head) over the one before; eagle3, medusa and hydra 0.8, else 1.
      token_loss: ce (all methods), lk (-log acceptance) or lk_blend.
      eta: of lk_blend, how soon the total variation takes over; 3.
      token_weight: of the token loss; eagle3 1, else 0.1.
      feature_weight: of the feature loss; eagle3 0, else 1.
      noise: width of the uniform noise on features; eagle3 0, else 0.1.
      taps: the target's hidden states that are fused, numbered as `hidden_states` of transformers; of L
        layers 2, L/2 and L-3.
      fc_norm: a norm per tap before the projection (EAGLE-3.1).
      norm_output: feed the normed state back (EAGLE-3.1).
      draft_vocab: size of the draft vocabulary of EAGLE-3; 0 is the target's, None 32000 or the target's if smaller.
        A head that is given by --init keeps its own, and its taps and width.
      head_intermediate: width of an EAGLE head's MLP, 0 for the target's.
      heads: of medusa (5), hydra and hydra++ (4): levels that can be drafted.
      head_layers: residual blocks of each, 1. With more than one (Medusa) or two (Hydra) the authors' programs read
        the last block in the place of all that they share, so that those heads are for this library; they trained
        Hydra++ with four.
      teacher: their labels are the target's law; else the texts' own tokens. hydra++ True.
    """

    method: Literal["eagle3", "eagle1", "hass", "medusa", "hydra", "hydra++"] = "eagle3"
    unroll: int | None = None
    decay: float | None = None
    token_loss: Literal["ce", "lk", "lk_blend"] | None = None
    eta: float | None = None
    token_weight: float | None = None
    feature_weight: float | None = None
    noise: float | None = None
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab: int | None = None
    head_intermediate: int = 0
    heads: int | None = None
    head_layers: int | None = None
    teacher: bool | None = None


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
