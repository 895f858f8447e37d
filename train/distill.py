"""Distils a small draft model from a frozen target, for standard speculative sampling.

    python -m train.distill --config configs/demo_small.yaml
    python -m train.distill --config configs/gpt2_medium.yaml --divergence tv

The small model learns the target's distribution at every supervised token (DistillSpec, arXiv:2310.08461), by KL, by
total variation or by -log of the acceptance. It starts from a given model of the same tokenizer (`--init`), from layers
of the target (`--target-layers`), or fresh (`--layers`, other sizes as the target's). Data, resumption and meshes are
those of `train.head`. The model is written to `model/` with the target's tokenizer. The last line of output is one JSON
object.
"""

from __future__ import annotations

from eagle_jax.runtime.compilation import use_compilation_cache
from infer.common.programs import at_least_one, option_of, run
from train.loop.learners import SmallModelLearner
from train.loop.options import DistillArgs as Args
from train.loop.setup import check_run
from train.loop.training import start

SIZES = ("hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim")


def main(args: Args) -> int:
    """Distils and measures a model, writes it, and returns the exit status.

    Raises:
      ValueError: an option is out of range, or excludes another; the message names it.
    """
    check_run(args)
    at_least_one(args, "layers", *SIZES)
    given = "--init" if args.init is not None else "--target-layers" if args.target_layers else None
    sized = [option_of(name) for name in SIZES if getattr(args, name) is not None]
    if given is not None and sized:
        raise ValueError(f"{sized[0]} must come without {given}, got both. Leave one out.")
    if args.init is not None and args.target_layers:
        raise ValueError("--init must come without --target-layers, got both. Leave one out.")
    return start(args, SmallModelLearner(args))


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
