"""Defines what a training run trains: EAGLE heads, Medusa and Hydra heads, small draft models.

A run (`train.loop.run`) handles data, meshes, checkpoints and measurements. A learner holds what is trained:
parameters, loss, drafting and file format.
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

import eagle_jax
from eagle_jax import training
from eagle_jax.checkpoints import (
    TOKENIZER,
    check_same_tokens,
    config_directory,
    is_gguf,
    load_head_checkpoint,
    load_medusa_checkpoint,
    load_target_checkpoint,
    read_target_config,
    save_head_checkpoint,
    save_medusa_checkpoint,
    save_target_checkpoint,
    tokenizer_directory,
)
from eagle_jax.config import ConfigError, DecoderConfig, HeadConfig, MedusaConfig, TreeConfig
from eagle_jax.core.types import Params
from eagle_jax.models.quantised import dequantise
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import processes
from eagle_jax.runtime.drafters import TreeDrafter
from eagle_jax.shapes import medusa_parents
from eagle_jax.training import Frozen, MicroBatch
from infer.common.programs import naming, parse_tree
from train.loop.options import DistillArgs, HeadArgs
from train.loop.places import head_path, target_path
from train.loop.setup import check_copied, check_initial, head_config

NUM_HEADS = {"medusa": 5, "hydra": 4, "hydra++": 4}
"""Default number of heads, as the authors trained them."""
RATES = {"eagle3": 1e-4, "eagle1": 3e-5, "hass": 3e-5, "medusa": 1e-3, "hydra": 5e-4, "hydra++": 5e-4}
"""Peak learning rates of the methods' authors."""


def init_path(args: HeadArgs) -> str:
    """Returns the path or hub id of `--init`, "" without; "demo" is the bundled head of the method."""
    return "" if args.init is None else head_path(args.init, "--init", args.method.rstrip("+"))


class Learner(abc.ABC):
    """Defines what a run needs of the model that it trains."""

    program = "head"  # module of `train`
    folder = "head"  # directory of the result in the run's directory
    part = "head"  # name of the parameters in the engine
    rate: float = 5e-4  # default peak learning rate
    terms: int = 1  # means in the loss; term k is on the prediction of a token `ahead` + k places ahead
    ahead: int = 2
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads besides the last
    scaled: bool = False  # training divides taps by their root mean square per channel; finished weights include it
    draft_vocab: int | None = None  # size of a vocabulary that is counted in the data; None is the whole vocabulary
    d2t: np.ndarray | None = None  # draft vocabulary of the initial weights
    initial: Params | None = None  # initial weights; None draws fresh ones
    copies_layers: bool = False  # fresh weights are layers of the target, so these are loaded even with stored features

    @abc.abstractmethod
    def begin(self, target: eagle_jax.Target) -> None:
        """Sets sizes and initial weights for a target."""

    @abc.abstractmethod
    def fresh(self, key: Array, target: Params, d2t: Array | None, scale: Array | None) -> Params:
        """Draws fresh parameters; `scale` is that of `scaled`."""

    @abc.abstractmethod
    def loss(self, frozen: Frozen, mesh: Mesh | None, remat: bool, trained: Params, batch: MicroBatch) -> Any:
        """Returns loss and metrics of a micro-batch on a mesh."""

    def count_rows(self, texts: PackedTokens) -> Array:
        """Counts the rows of every term of the loss."""
        return training.count_rows(texts, self.terms, self.ahead)

    def finished(self, trained: Params, frozen: Frozen) -> Params:
        """Returns the parameters that engine and files hold."""
        return {self.part: trained}

    @abc.abstractmethod
    def bind(self, params: Params, target: eagle_jax.Target) -> TreeDrafter:
        """Returns a drafter with the tree that tau is measured with."""

    @abc.abstractmethod
    def write(self, params: Params, directory: Path) -> None:
        """Writes finished parameters from the host; called on every process."""


class EagleLearner(Learner):
    """Trains an EAGLE head by the objective of EAGLE-1/2, HASS or EAGLE-3."""

    config: HeadConfig

    def __init__(self, args: HeadArgs) -> None:
        self.args, self.rate, self.copies_layers = args, RATES[args.method], args.copy_layer
        names = ("decay", "token_loss", "eta", "token_weight", "feature_weight", "noise", "chunk")
        given = {"steps": args.unroll, **{name: getattr(args, name) for name in names}}
        changed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self.objective = dataclasses.replace(training.PRESETS[args.method], **changed)
        self.terms = self.objective.steps
        self.tree = parse_tree(args.eval_tree or "6,10,59", "--eval-tree")
        self.init = init_path(args)

    def begin(self, target: eagle_jax.Target) -> None:
        self.target = target
        self.config = self._read() if self.init else head_config(self.args, target.config)
        if self.copies_layers:
            check_copied(self.args, self.config, target.config)
        self.taps = self.config.taps
        self.scaled = self.config.kind == "eagle3" and not self.config.fc_norm
        self.draft_vocab = self.config.draft_vocab_size if self.config.kind == "eagle3" else None

    def _read(self) -> HeadConfig:
        """Reads the initial head, and returns its configuration.

        Taps, draft vocabulary and width are those of the head unless an option sets them. The rest must be the run's.
        """
        args, target = self.args, self.target
        embedding = jax.tree.map(processes.to_host, target.params["embed_tokens"]["embedding"])
        with naming("--init", str(args.init)):
            given, params = load_head_checkpoint(self.init, target.config, "float32", embedding=embedding)
        changes: dict[str, Any] = {"head_intermediate": args.head_intermediate or given.layer.intermediate_size}
        if args.method == "eagle3":
            size = given.draft_vocab_size if args.draft_vocab is None else args.draft_vocab
            changes |= {"taps": args.taps or given.taps, "draft_vocab": size}
        wanted = head_config(dataclasses.replace(args, **changes), target.config)
        kept = {name: getattr(given.layer, name) for name in ("max_position", "eos_ids", "bos_id", "architecture")}
        wanted = dataclasses.replace(wanted, layer=dataclasses.replace(wanted.layer, **kept))
        check_initial(args.init, given, wanted)
        self.initial, self.d2t = params["head"], np.asarray(params["d2t"]) if "d2t" in params else None
        return given

    def fresh(self, key: Array, target: Params, d2t: Array | None, scale: Array | None) -> Params:
        copied = self.target.config.num_layers - 1 if self.copies_layers else None
        return training.fresh_head(self.config, key, target, d2t, scale, copied)

    def loss(self, frozen: Frozen, mesh: Mesh | None, remat: bool, trained: Params, batch: MicroBatch) -> Any:
        objective, (texts, target_outputs, key, shares) = dataclasses.replace(self.objective, remat=remat), batch
        configs, dtype = (self.target.config, self.config), self.args.dtype
        return training.head_loss(*configs, objective, trained, frozen, texts, key, dtype, target_outputs, mesh, shares)

    def finished(self, trained: Params, frozen: Frozen) -> Params:
        scale, d2t = frozen.feature_scale, frozen.d2t
        head = trained if scale is None else training.fold_scale(trained, scale)
        return {"head": head} if d2t is None else {"head": head, "d2t": d2t}

    def bind(self, params: Params, target: eagle_jax.Target) -> TreeDrafter:
        return eagle_jax.DraftHead.from_params(self.config, params, target, self.tree)

    def write(self, params: Params, directory: Path) -> None:
        table = dequantise(self.target.params["embed_tokens"]["embedding"]) if self.config.kind == "eagle1" else None
        embedding = processes.to_host(table)
        if jax.process_index() == 0:
            save_head_checkpoint(self.config, params, directory, embedding=embedding)


class MedusaLearner(Learner):
    """Trains heads of Medusa-1, Hydra or Hydra++."""

    part = "heads"
    config: MedusaConfig

    def __init__(self, args: HeadArgs) -> None:
        self.args, self.rate = args, RATES[args.method]
        self.terms = heads = args.heads or NUM_HEADS[args.method]
        given = args.eval_tree
        self.tree = TreeConfig.static(medusa_parents(heads)) if given is None else parse_tree(given, "--eval-tree")
        if self.tree.depth > heads:
            raise ConfigError(f"--eval-tree must have at most {heads} levels, got {given}. Each of --heads drafts one.")
        self.init = init_path(args)

    def begin(self, target: eagle_jax.Target) -> None:
        args, config = self.args, target.config
        self.target = config
        prefix = config.one_layer(tie_word_embeddings=False) if args.method == "hydra++" else None
        self.config = MedusaConfig(
            "medusa" if args.method == "medusa" else "hydra", config.hidden_size, config.vocab_size, self.terms,
            args.head_layers or 1, prefix,
        )  # fmt: skip
        if not self.init:
            return
        with naming("--init", str(args.init)):
            given, params = load_medusa_checkpoint(self.init, config, "float32")
        method = "hydra++" if given.prefix is not None else given.kind
        if method != args.method:
            raise ConfigError(
                f"--init must be heads of --method {args.method}, got heads of {method} ({args.init}). Give other "
                "heads or another method."
            )
        check_initial(args.init, given, self.config)
        self.initial = params["heads"]

    def fresh(self, key: Array, target: Params, d2t: Array | None, scale: Array | None) -> Params:
        return training.fresh_medusa(self.config, key, target)

    def loss(self, frozen: Frozen, mesh: Mesh | None, remat: bool, trained: Params, batch: MicroBatch) -> Any:
        args = self.args
        texts, outputs, logits = training.read_target(
            self.target, frozen.target, batch.texts, batch.target_outputs, mesh
        )
        return training.medusa_loss(
            self.config, trained, outputs, texts, logits, decay=0.8 if args.decay is None else args.decay,
            teacher=args.method == "hydra++" if args.teacher is None else args.teacher, chunk=args.chunk or 256,
            dtype=args.dtype, remat=remat, shares=batch.shares,
        )  # fmt: skip

    def bind(self, params: Params, target: eagle_jax.Target) -> TreeDrafter:
        return eagle_jax.Medusa.from_params(self.config, params, target, self.tree)

    def write(self, params: Params, directory: Path) -> None:
        if jax.process_index() == 0:
            save_medusa_checkpoint(self.config, params, directory)


class SmallModelLearner(Learner):
    """Trains a small model on the target's distribution."""

    program, folder, part, ahead = "distill", "model", "model", 1
    config: DecoderConfig

    def __init__(self, args: DistillArgs) -> None:
        self.args, self.copies_layers = args, bool(args.target_layers)
        self.tree = TreeConfig.chain(5) if args.eval_tree is None else parse_tree(args.eval_tree, "--eval-tree")
        self.place = target_path(args.tokenizer or args.target)

    def begin(self, target: eagle_jax.Target) -> None:
        args, self.target = self.args, target.config
        if args.init is not None:
            self._read(args.init)
            return
        last = self.target.num_layers - 1
        if outside := [layer for layer in args.target_layers if not 0 <= layer <= last]:
            named = " ".join(map(str, outside))
            raise ConfigError(f"--target-layers must be layers of the target, 0 to {last}, got {named}. Drop them.")
        sizes = {"hidden_size": args.hidden, "intermediate_size": args.intermediate, "num_heads": args.num_heads,
                 "num_kv_heads": args.num_kv_heads, "head_dim": args.head_dim,
                 "num_layers": len(args.target_layers) or args.layers}  # fmt: skip
        given: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
        try:
            self.config = dataclasses.replace(self.target, **given)
        except ConfigError as error:
            raise ConfigError(f"the sizes of the draft model must fit together: {error}") from error

    def _read(self, name: str) -> None:
        """Reads the initial model."""
        path = target_path(name)
        with naming("--init", name):
            sizes = read_target_config(config_directory(path)).vocab_size, self.target.vocab_size
            warning = check_same_tokens(path, self.place, sizes)
            self.config, self.initial = load_target_checkpoint(path, "float32")
            if warning is not None:
                logging.warning("%s", warning)
        if self.config.max_position < self.args.length:
            raise ConfigError(
                f"--length must be at most the {self.config.max_position} positions of --init {name}, got "
                f"{self.args.length}. Lower it."
            )

    def fresh(self, key: Array, target: Params, d2t: Array | None, scale: Array | None) -> Params:
        return training.fresh_draft_model(self.config, key, target, self.args.target_layers)

    def loss(self, frozen: Frozen, mesh: Mesh | None, remat: bool, trained: Params, batch: MicroBatch) -> Any:
        args = self.args
        texts, outputs, logits = training.read_target(
            self.target, frozen.target, batch.texts, batch.target_outputs, mesh
        )
        return training.distillation_loss(
            self.config, trained, texts, outputs.hidden, logits, dtype=args.dtype, divergence=args.divergence,
            chunk=args.chunk or 256, remat=remat, shares=batch.shares,
        )  # fmt: skip

    def bind(self, params: Params, target: eagle_jax.Target) -> TreeDrafter:
        model = eagle_jax.Target.from_params(self.config, params["model"], "draft model", target.mesh)
        return eagle_jax.SmallModel.from_model(target, model, self.tree)

    def write(self, params: Params, directory: Path) -> None:
        if jax.process_index() > 0:
            return
        directory.mkdir(parents=True, exist_ok=True)
        place = tokenizer_directory(self.place)  # written before the weights: they make the directory a model
        if is_gguf(place):
            eagle_jax.load_tokenizer(place, self.target).save_pretrained(directory)
        else:
            for pattern in TOKENIZER:
                for file in place.glob(pattern):
                    shutil.copy(file, directory)
        save_target_checkpoint(self.config, params["model"], directory, "bfloat16")
