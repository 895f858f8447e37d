"""Defines the options of training runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from eagle_jax.models.quantised import Scheme
from eagle_jax.training import Divergence, OptimiserKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetArgs:
    """Options of programs that load a target and render conversations for it."""

    target: str  # directory, GGUF file or hub id of the model; demo and smollm2 are bundled pairs' models
    # quantises the target when it is loaded (docs/own_model.md): replies and states are those of the quantised target
    weights: Scheme | None = None
    tokenizer: str | None = None  # path or hub id, if the target's directory has none
    # Jinja file for a tokenizer without a template (Vicuna), or the name of one of the tokenizer's own
    chat_template: str | None = None
    # arguments of the chat template, NAME=VALUE each, such as enable_thinking=false
    template_args: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusArgs(TargetArgs):
    """Options of programs that read a corpus and write a directory."""

    data: tuple[str, ...]  # sources `path[#split][@weight]` of conversations; weights are for training
    out: Path  # directory to write


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunArgs(CorpusArgs):
    """Options of every training run; None takes the method's default."""

    heldout: tuple[str, ...] = ()  # sources of the prompts that tau is measured on; never trained on
    features: Path | None = None  # directory of `train.features`, to read instead of running the target
    init: str | None = None  # trained weights to start from (path, hub id; demo is a bundled head)
    steps: int = 1000  # updates
    # peak learning rate (method default: eagle3 1e-4, eagle1 and hass 3e-5, medusa 1e-3, the others 5e-4)
    rate: float | None = None
    # adam, as in the papers, or muon for the matrices of layers and adam for the rest. muon learns faster, and its best
    # rate is higher (docs/training.md)
    optimiser: OptimiserKind = "adam"
    warmup: int = 100  # updates until the peak
    clip: float = 0.5  # largest norm of a gradient
    max_gradient: float = 1e4  # a gradient above this norm (before clipping) stops the run
    rows: int = 8  # packed rows per update, over all processes
    micro_batches: int = 1  # parts of an update that are computed one after the other
    length: int = 2048  # tokens per row
    chunk: int | None = None  # positions of a packed row whose logits exist at once (method default: 256)
    remat: bool | None = None  # recompute chunks and unrolled steps for their gradient (method default: True)
    # dtype of the target, of products and of activations; trained weights and optimiser state are float32
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    data_axis: int = 0  # devices along "data"; 0 takes all that the other two axes leave
    fsdp: int = 1  # devices along "fsdp"
    tensor: int = 1  # devices along "tensor"
    seed: int = 0  # seed of initial weights, data order and noise
    log_every: int = 10  # updates per line of the log
    save_every: int = 200  # updates per checkpoint
    eval_every: int = 0  # updates per measurement of tau; 0 measures at the end only
    eval_prompts: int = 16  # held-out prompts per measurement
    eval_tokens: int = 128  # tokens per reply of a measurement
    # depth,top_k,num_nodes of measured drafts (method default: EAGLE 6,10,59, small models a chain of 5, else Medusa's)
    eval_tree: str | None = None
    tensorboard: bool = True  # write `tensorboard/`


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadArgs(RunArgs):
    """Options of `train.head`; None takes the method's default."""

    method: Literal["eagle3", "eagle1", "hass", "medusa", "hydra", "hydra++"] = "eagle3"  # objective and kind of head
    unroll: int | None = None  # steps of an EAGLE head on its own outputs (method default: eagle3 7, hass 3, eagle1 1)
    # weight of each step (Medusa: each head) relative to the one before (method default: hass 1, the others 0.8)
    decay: float | None = None
    # ce, lk (-log acceptance) or lk_blend (method default: ce)
    token_loss: Literal["ce", "lk", "lk_blend"] | None = None
    # rate of lk_blend: a larger one gives the total variation more weight at the same acceptance (method default: 3)
    eta: float | None = None
    token_weight: float | None = None  # weight of the token loss (method default: eagle3 1, others 0.1)
    feature_weight: float | None = None  # weight of the feature loss (method default: eagle3 0, others 1)
    noise: float | None = None  # bound of the uniform noise on features (method default: eagle3 0, others 0.1)
    # the target's hidden states to fuse, numbered as transformers' `hidden_states` (method default: 2, L/2, L-3 of L)
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False  # a norm per tap before the projection (EAGLE-3.1)
    norm_output: bool = False  # feed the normed state back (EAGLE-3.1)
    # size of EAGLE-3's draft vocabulary; 0 is the target's (method default: 32000, or the whole vocabulary of a smaller
    # target). A head given by --init keeps its own size, taps and width
    draft_vocab: int | None = None
    head_intermediate: int = 0  # width of an EAGLE head's MLP; 0 is the target's
    copy_layer: bool = False  # start the layer of eagle3 with the target's last one, which needs its sizes
    heads: int | None = None  # number of heads of medusa (5), hydra and hydra++ (4), one per drafted level
    # residual blocks per head (method default: 1; the authors' Hydra++ has 4, the last three with shared weights). The
    # authors' code reads at most 1 (Medusa) or 2 (Hydra)
    head_layers: int | None = None
    # labels are the target's distribution instead of the text's tokens (method default: True for hydra++)
    teacher: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillArgs(RunArgs):
    """Options of `train.distill`. A size of None is that of the target."""

    # kl, tv (rejection rate of standard speculative sampling) or lk (-log of its acceptance rate)
    divergence: Divergence = "kl"
    layers: int = 2  # number of layers of a fresh model
    # layers of the target (from 0) that initialise the model, with its embedding and lm_head
    target_layers: tuple[int, ...] = ()
    hidden: int | None = None  # width of a fresh model
    intermediate: int | None = None  # width of its MLPs
    num_heads: int | None = None  # attention heads
    num_kv_heads: int | None = None  # key-value heads
    head_dim: int | None = None  # size of an attention head
