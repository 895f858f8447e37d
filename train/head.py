"""Trains a draft head on a frozen target.

    python -m train.head --config configs/tiny_cpu.yaml
    python -m train.head --config configs/llama31_8b.yaml --steps 2000 --out runs/mine

`--method` chooses the papers' objective (eagle3, eagle1, hass); every number of it can be set. Data are conversations
(JSONL, Parquet, datasets of the hub), see `eagle_jax.data.sources`. Several processes, as on a TPU pod, run the same
command. A run that was interrupted goes on where it was when the command is given again. Beside the checkpoints lie
`head/` (official format, the best by tau), `log.jsonl` and `figure.png`; the last line printed is one JSON object.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import signal
import time
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax import distributed
from eagle_jax.checkpoints import load_head_checkpoint, save_head_checkpoint
from eagle_jax.checkpoints.training import TrainingCheckpoints
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig
from eagle_jax.data.corpus import Corpus
from eagle_jax.data.loading import Batches
from eagle_jax.data.sources import Source, build_corpus
from eagle_jax.data.vocabulary import count_tokens, draft_vocabulary
from eagle_jax.programs import at_least_one, parse_tree, run
from eagle_jax.sharding import make_mesh, param_shardings
from eagle_jax.training import step as training
from eagle_jax.training.initialise import fresh_head
from eagle_jax.training.objective import PRESETS, Objective


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program; None takes the method's own value.

    Attributes:
      target: path or hub id of the model, frozen.
      data: sources `path[#split][@weight]` of conversations.
      out: the run's directory.
      heldout: sources that tau is measured on; never trained on.
      method: objective and kind of head.
      steps: updates.
      unroll: steps of the head on its own outputs.
      decay: weight of each further step of them.
      token_loss: ce, lk (-log acceptance) or lk_blend.
      token_weight: of the token loss.
      feature_weight: of the feature loss.
      noise: width of the uniform noise on features.
      taps: the target's hidden states that are fused, numbered as `hidden_states` of transformers.
      fc_norm: a norm per tap before the projection (EAGLE-3.1).
      norm_output: feed the normed state back (EAGLE-3.1).
      draft_vocab: size of the draft vocabulary; 0 is the target's.
      layer_intermediate: width of the head's MLP, 0 for the target's.
      init: a trained head to start from.
      rate: peak learning rate.
      warmup: updates until it is reached.
      clip: largest norm of a gradient.
      rows: packed rows per update, over all processes.
      micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.
      dtype: of products and activations of head and target; master weights and optimiser state are float32.
      data_axis: devices along "data"; 0 takes what the other two leave.
      fsdp: devices along "fsdp".
      tensor: devices along "tensor".
      seed: of weights, order and noise.
      log_every: updates per line of the log.
      save_every: updates per checkpoint.
      eval_every: updates per measurement of tau; 0 measures at the end only.
      eval_prompts: held-out prompts per measurement.
      eval_tokens: tokens per reply of a measurement.
      eval_tree: depth,top_k,num_nodes of its drafts.
    """

    target: str
    data: tuple[str, ...]
    out: Path
    heldout: tuple[str, ...] = ()
    method: Literal["eagle3", "eagle1", "hass"] = "eagle3"
    steps: int = 1000
    unroll: int | None = None
    decay: float | None = None
    token_loss: Literal["ce", "lk", "lk_blend"] = "ce"
    token_weight: float | None = None
    feature_weight: float | None = None
    noise: float | None = None
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    draft_vocab: int = 32000
    layer_intermediate: int = 0
    init: str | None = None
    rate: float = 1e-4
    warmup: int = 100
    clip: float = 0.5
    rows: int = 8
    micro_batches: int = 1
    length: int = 2048
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    data_axis: int = 0
    fsdp: int = 1
    tensor: int = 1
    seed: int = 0
    log_every: int = 10
    save_every: int = 200
    eval_every: int = 0
    eval_prompts: int = 16
    eval_tokens: int = 128
    eval_tree: str = "6,10,59"


def objective_of(args: Args) -> Objective:
    """The method's objective with what `args` changes of it."""
    given = {"steps": args.unroll, "decay": args.decay, "token_weight": args.token_weight,
             "feature_weight": args.feature_weight, "noise": args.noise}  # fmt: skip
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(PRESETS[args.method](), token_loss=args.token_loss, **changes)


def head_config(args: Args, target: DecoderConfig) -> HeadConfig:
    """The head's shape: one layer as wide as the target's."""
    width = args.layer_intermediate or target.intermediate_size
    layer = dataclasses.replace(target, num_layers=1, intermediate_size=width, tie_word_embeddings=False)
    if args.method != "eagle3":
        return HeadConfig("eagle1", layer, target.vocab_size, target.hidden_size, (target.num_layers,))
    taps = args.taps or (2, target.num_layers // 2, target.num_layers - 3)
    size = min(args.draft_vocab or target.vocab_size, target.vocab_size)
    switches = {"fc_norm": args.fc_norm, "norm_output": args.norm_output}
    return HeadConfig("eagle3", layer, size, target.hidden_size, taps, **switches)
