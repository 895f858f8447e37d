"""Distils a small draft model from a frozen target: standard speculative sampling with a model that knows its target.

    python -m train.distill --config configs/demo_small.yaml
    python -m train.distill --config configs/gpt2_medium.yaml --divergence tv

The small model learns the target's law, token by token, where the target speaks (DistillSpec, arXiv:2310.08461): by KL,
or by what is accepted itself (total variation, or its logarithm). It begins as a given model of the same tokenizer
(`--init`), as some layers of the target (`--target-layers`), or fresh (`--layers`, and the target's sizes where no
option says otherwise). Data, resumption, meshes and files are those of `train.head`; the model is written to `model/`,
with the target's tokenizer. The last line printed is one JSON object.
"""

from __future__ import annotations

import dataclasses

from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, run
from train.loop.learners import SmallModelLearner
from train.loop.options import DistillArgs, check_run
from train.loop.training import start

Args = DistillArgs
SIZES = ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")


def check(args: Args) -> None:
    """Refuses numbers that cannot be meant.

    Raises:
      ValueError: naming the option.
    """
    check_run(args)
    at_least_one(args, "layers", *SIZES)
    for name in SIZES:
        if getattr(args, name) is not None and (args.init is not None or args.target_layers):
            what = "--init" if args.init is not None else "--target-layers"
            raise ValueError(f"--{name.replace('_', '-')} is of a fresh model, and {what} gives one that has its sizes")
    if args.init is not None and args.target_layers:
        raise ValueError("--init and --target-layers both say what to begin with: give one")


def main(args: Args) -> int:
    """Distils, measures, writes the model."""
    check(args)
    if args.rate is None:
        args = dataclasses.replace(args, rate=5e-4)
    return start(args, SmallModelLearner(args))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
