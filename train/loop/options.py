"""Defines the options of training runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from eagle_jax.training.distill import Divergence


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetArgs:
    """Options of programs that render conversations for a target.

    Attributes:
      target: path or hub id of the model; demo is the bundled one.
      tokenizer: path or hub id, if the target's directory has none.
      chat_template: Jinja file for a tokenizer without a template (Vicuna), or the name of one of the tokenizer's own.
      template_args: arguments of the chat template, NAME=VALUE each, such as enable_thinking=false.
    """

    target: str
    tokenizer: str | None = None
    chat_template: str | None = None
    template_args: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusArgs(TargetArgs):
    """Options of programs that read a corpus and write a directory.

    Attributes:
      data: sources `path[#split][@weight]` of conversations; weights are for training.
      out: directory to write.
    """

    data: tuple[str, ...]
    out: Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArgs(CorpusArgs):
    """Options of every training run; None takes the method's default.

    Attributes:
      heldout: sources of the prompts that tau is measured on; never trained on.
      features: directory of `train.features`, to read instead of running the target.
      init: trained weights to start from (path, hub id; demo is a bundled head).
      steps: updates.
      rate: peak learning rate; eagle1 and hass 3e-5, medusa 1e-3, hydra and hydra++ 5e-4, small models 5e-4, else 1e-4.
      warmup: updates until the peak.
      clip: largest norm of a gradient.
      max_gradient: a gradient above this norm (before clipping) stops the run.
      rows: packed rows per update, over all processes.
      micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.
      chunk: rows of a text whose logits exist at once; 256.
      remat: recompute chunks (and unrolled steps) for their gradient; True.
      dtype: of the target, and of products and activations; trained weights and optimiser state are float32.
      data_axis: devices along "data"; 0 takes all that the other two axes leave.
      fsdp: devices along "fsdp".
      tensor: devices along "tensor".
      seed: of initial weights, data order and noise.
      log_every: updates per line of the log.
      save_every: updates per checkpoint.
      eval_every: updates per measurement of tau; 0 measures at the end only.
      eval_prompts: held-out prompts per measurement.
      eval_tokens: tokens per reply of a measurement.
      eval_tree: depth,top_k,num_nodes of its drafts; EAGLE heads 6,10,59, small models chains of 5, else Medusa's tree.
      tensorboard: write `tensorboard/`.
    """

    heldout: tuple[str, ...] = ()
    features: Path | None = None
    init: str | None = None
    steps: int = 1000
    rate: float | None = None
    warmup: int = 100
    clip: float = 0.5
    max_gradient: float = 1e4
    rows: int = 8
    micro_batches: int = 1
    length: int = 2048
    chunk: int | None = None
    remat: bool | None = None
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
    eval_tree: str | None = None
    tensorboard: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadArgs(RunArgs):
    """Options of `train.head`; None takes the method's default.

    Attributes:
      method: objective and kind of head.
      unroll: steps of an EAGLE head on its own outputs; eagle3 7, hass 3, eagle1 1.
      decay: weight of each step (Medusa: each head) relative to the one before; eagle3, medusa and hydra 0.8, else 1.
      token_loss: ce (all methods), lk (-log acceptance) or lk_blend.
      eta: of lk_blend; a larger value gives the total variation more weight at the same acceptance; 3.
      token_weight: of the token loss; eagle3 1, else 0.1.
      feature_weight: of the feature loss; eagle3 0, else 1.
      noise: bound of the uniform noise on features; eagle3 0, else 0.1.
      taps: the target's hidden states that are fused, numbered as `hidden_states` of transformers; for L layers 2, L/2
        and L-3.
      fc_norm: a norm per tap before the projection (EAGLE-3.1).
      norm_output: feed the normed state back (EAGLE-3.1).
      draft_vocab: size of EAGLE-3's draft vocabulary; 0 is the target's, None 32000 or the target's if smaller.
        A head given by --init keeps its own, and its taps and width.
      head_intermediate: width of an EAGLE head's MLP; 0 is the target's.
      heads: number of heads of medusa (5), hydra and hydra++ (4), one per drafted level.
      head_layers: residual blocks of each, 1. The authors' Hydra++ has four. Their programs cannot read more than one
        block (Medusa) or two (Hydra) of this library.
      teacher: labels are the target's distribution instead of the text's tokens; hydra++ True.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillArgs(RunArgs):
    """Options of `train.distill`; None takes the target's size.

    Attributes:
      divergence: kl, tv (rejection rate of standard speculative sampling) or lk (-log of its acceptance rate).
      layers: of a fresh model.
      target_layers: layers of the target (from 0) that initialise the model, with its embedding and lm_head.
      hidden: width of a fresh model.
      intermediate: width of its MLPs.
      num_heads: attention heads.
      num_kv_heads: key-value heads.
      head_dim: size of an attention head.
    """

    divergence: Divergence = "kl"
    layers: int = 2
    target_layers: tuple[int, ...] = ()
    hidden: int | None = None
    intermediate: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegenerateArgs(CorpusArgs):
    """Options of `train.regenerate`.

    Attributes:
      head: path of a head that drafts, or "demo"; None decodes without drafts.
      tree: depth,top_k,num_nodes of its drafts.
      limit: source rows to answer, drawn by the seed (a smaller limit draws a subset of a larger one's); None is all.
      batch: conversations at once, per process.
      max_new_tokens: longest reply.
      max_prompt: longest prompt; a conversation ends before a longer one.
      keep_cut: keep replies that --max-new-tokens cut off; otherwise the conversation ends before such a reply.
      temperatures: of the replies; rows take turns.
      top_k: of sampling; 0 is off.
      top_p: of sampling.
      seed: of sampling and of --limit.
      dtype: of weights and activations; bfloat16 is faster on accelerators.
      tensor: devices that the target is split over; the other devices of a process split the batch.
      shard_rows: source rows per shard.
    """

    head: str | None = None
    tree: str = "3,2,5"
    limit: int | None = None
    batch: int = 64
    max_new_tokens: int = 1024
    max_prompt: int = 1024
    keep_cut: bool = True
    temperatures: tuple[float, ...] = (0.0, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    tensor: int = 1
    shard_rows: int = 1024
