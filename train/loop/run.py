"""Builds a training run: it updates, evaluates, saves, resumes and exports a draft head."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eagle_jax
from eagle_jax import training
from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.training import TrainingCheckpoints
from eagle_jax.core.types import Params
from eagle_jax.data.chat import stop_ids, tokenizer_settings
from eagle_jax.data.corpus import Batches, Features, build_corpus, corpus_key, coverage, draft_vocabulary
from eagle_jax.evaluate import measure_n_alpha
from eagle_jax.packed import PackedTokens
from eagle_jax.parallel import param_shardings, processes
from infer.common.programs import naming
from train.loop.learners import Learner
from train.loop.options import RunArgs
from train.loop.places import note_run, sources_of, target_path, tokenizer_of
from train.loop.setup import generation_mesh, held_prompts, load_target, mesh_of, respread, weights_of

MAY_CHANGE = ("out", "steps", "micro_batches", "data_axis", "fsdp", "tensor", "log_every", "save_every", "eval_every",
              "eval_prompts", "eval_tokens", "eval_tree", "heldout", "tensorboard")  # fmt: skip
"""Arguments that may differ when a run resumes: they change neither the data nor the learning.

Two have a small effect. `steps` is also the length of the learning rate's decay. Micro-batches may have unequal shares
of rows outside the draft vocabulary (`head_train_step`).
"""
MEASURED = ("heldout", "eval_prompts", "eval_tokens", "eval_tree")
"""Arguments that tau depends on. When they change, the best tau so far is discarded."""


class Run:
    """Holds the parts of a run, the same on every process.

    Raises:
      ConfigError, ValueError, CheckpointError: arguments or files do not fit together; raised before any compilation.
    """

    def __init__(self, args: RunArgs, learner: Learner) -> None:
        self.args, self.learner, self.step = args, learner, 0
        self.mesh = mesh_of(args)
        with naming("--target", args.target):
            self.target = load_target(target_path(args.target), args, self.mesh, layers=learner.copies_layers)
        learner.begin(self.target)
        tokenizer = tokenizer_of(args, self.target.config)
        sources = sources_of(args.data)
        self.weights = weights_of(sources)
        self.prompts: list[list[int]] = []
        if args.heldout:
            self.measured_on = generation_mesh(self.mesh, self.target)
            self.prompts = held_prompts(args, tokenizer, self.measured_on)
            self.stops = stop_ids(self.target, tokenizer)
        self.key = corpus_key(sources, tokenizer)
        size = self.target.config.vocab_size
        build = functools.partial(build_corpus, sources, tokenizer, args.out / "data", key=self.key, vocab_size=size)
        self.corpus, _ = processes.leader_first(build, "corpus")
        count = jax.process_count()
        self.batches = Batches(
            self.corpus, self.weights, length=args.length, rows=args.rows // count, seed=args.seed,
            process=jax.process_index(), processes=count,
        )  # fmt: skip
        self.features = None
        if args.features is not None:
            whole = "layers_0" in self.target.params
            wanted: dict[str, Any] = {"corpus": self.key, "target": args.target, "scheme": args.weights}
            if args.weights is not None:  # scales are of the dtype
                wanted["computed"] = args.dtype
            wanted["weights" if whole else "ends"] = self._fingerprint(layers=whole)
            if learner.taps:  # a learner without taps accepts features of any taps
                wanted["taps"] = learner.taps
            with naming("--features", args.features):
                self.features = Features(args.features, self.corpus, wanted, args.length)
        self.d2t, self.coverage = self._vocabulary()
        rate = args.rate or learner.rate
        self.tx = training.head_optimiser(rate, args.warmup, args.steps, args.clip, args.optimiser)
        self.settings = self._settings(tokenizer)
        self.measured = {name: getattr(args, name) for name in MEASURED} | {"heldout": list(args.heldout)}
        if args.heldout:
            self.measured["stop tokens"] = list(self.stops)
        self.checkpoints = TrainingCheckpoints(args.out)
        self._check_saved()

    def _fingerprint(self, layers: bool) -> str:
        return processes.fingerprint(self.target.params, self.target.config, layers)

    def _vocabulary(self) -> tuple[np.ndarray | None, float]:
        """Returns the draft vocabulary and the share of the supervised tokens that it holds."""
        size = self.learner.draft_vocab
        if size is None:
            return None, 1.0
        counts, places = self.corpus.token_counts(self.target.config.vocab_size), np.arange(size, dtype=np.int32)
        given = self.learner.d2t
        kept = draft_vocabulary(counts, size) if given is None else given + places
        return kept - places, coverage(counts, kept)

    def _settings(self, tokenizer: Any) -> dict[str, Any]:
        """Returns the settings that a resumed run must share, as JSON values.

        They include hashes of contents: files of a glob, or a target, may change under the same name.
        """
        given = {name: value for name, value in dataclasses.asdict(self.args).items() if name not in MAY_CHANGE}
        vocabulary = None if self.d2t is None else hashlib.sha256(self.d2t.tobytes()).hexdigest()[:16]
        return {
            **json.loads(json.dumps(given, default=str)),  # as a restored checkpoint has them
            **tokenizer_settings(tokenizer),
            "contents of data": f"{self.key}, {len(self.corpus.tokens)} tokens",
            "draft vocabulary": vocabulary,
            "weights of target": self._fingerprint(layers=self.args.features is None),
        }

    def _check_saved(self) -> None:
        """Compares this run with the saved run in the directory."""
        args, notes = self.args, self.checkpoints.notes()
        if notes is None:
            return
        pairs = [(name, notes["settings"].get(name), value) for name, value in self.settings.items()]
        if other := "; ".join(f"{name} was {before}, is {now}" for name, before, now in pairs if before != now):
            raise CheckpointError(
                f"--out must be new or a run of this configuration, got {args.out} ({other}). Resume with its "
                "configuration, or choose another directory."
            )
        done = self.checkpoints.step or 0
        if done > args.steps:
            raise CheckpointError(f"--steps must be at least {done}, as {args.out} has, got {args.steps}. Raise it.")
        best = self.checkpoints.best_notes()
        if best is not None and args.heldout and best["measured"] != self.measured:
            logging.info("tau is measured in another way from now on; the best head so far does not count")
            self.checkpoints.forget_best()

    def prepare(self) -> None:
        """Creates the first state, or restores the last one, and builds the update."""
        replicated = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        abstract: Any = jax.ShapeDtypeStruct
        width, scaled = len(self.learner.taps) * self.target.config.hidden_size, self.learner.scaled
        scale = abstract((width,), jnp.float32, sharding=replicated) if scaled else None
        shapes = jax.eval_shape(self._fresh, self.target.params, scale)
        shardings = param_shardings(shapes, self.mesh)
        place = lambda x, sharding: abstract(x.shape, x.dtype, sharding=sharding)  # noqa: E731
        like = {"state": jax.tree.map(place, shapes, shardings)}
        if scaled:
            like["feature_scale"] = scale
        saved = self.checkpoints.restore(like)
        if saved is not None:
            if (count := len(saved.notes["positions"])) != jax.process_count():
                raise CheckpointError(
                    f"--out must be resumed by the {count} processes that saved it, got {jax.process_count()} for "
                    f"{self.args.out}. Start as many: every process reads its own share of the documents."
                )
            self.batches.set_state(saved.notes["positions"][jax.process_index()])
        position, batch = self.batches.get_state(), self._batch()
        self.batches.set_state(position)
        self.batch_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        if saved is not None:
            self.step, self.state, scale = saved.step, saved.state["state"], saved.state.get("feature_scale")
        else:
            scale = jax.jit(self._scale, out_shardings=replicated)(self.target.params, *batch) if scaled else None
            self.state = jax.jit(self._fresh, out_shardings=shardings)(self.target.params, scale)
            if (head := self.learner.initial) is not None:
                head = head if scale is None else training.fold_scale(head, 1.0 / scale)
                self.state = self.state._replace(head=jax.device_put(head, param_shardings(head, self.mesh)))
        self.learner.initial = None
        d2t = None if self.d2t is None else jax.device_put(self.d2t, replicated)
        self.frozen = training.Frozen(self.target.params, d2t, scale)
        update = functools.partial(self._update, self.mesh, self.args.remat is not False)
        options: Any = {"out_shardings": (shardings, replicated), "compiler_options": training.compiler_options()}
        self.update = jax.jit(update, donate_argnums=0, **options)

    def _scale(self, target: Params, texts: PackedTokens, target_outputs: training.TargetOutputs | None) -> jax.Array:
        """Returns the scale per channel of the features of the first micro-batch."""
        texts, target_outputs = jax.tree.map(lambda x: x[0], (texts, target_outputs))
        seen = target_outputs or training.observe(self.target.config, target, texts, self.learner.taps)
        return training.feature_scale(seen.features, texts)

    def _update(self, mesh: Any, remat: bool, state: Any, frozen: training.Frozen, *batch: Any) -> Any:
        """Returns the next state and the report, as `training.train_step`; `batch` is that of `_batch`."""
        loss = functools.partial(self.learner.loss, frozen, mesh, remat)
        return training.train_step(loss, self.learner.count_rows, self.tx, state, *batch)

    def _fresh(self, target: Params, scale: jax.Array | None) -> training.HeadTrainState:
        key = jax.random.key(self.args.seed)
        head = self.learner.fresh(key, target, None if self.d2t is None else jnp.asarray(self.d2t), scale)
        head = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), head)
        return training.HeadTrainState(head, self.tx.init(head), jnp.int32(0), key)

    def _batch(self) -> tuple[PackedTokens, training.TargetOutputs | None]:
        """Returns the next micro-batches, [M, B, T] over all processes, and their stored features."""
        texts, target_outputs = next(self.batches), None
        if self.features is not None:
            rows: Any = (self.batches.documents, texts.positions, texts.segments)
            stored: Any = self.features.take(*rows)
            target_outputs = training.TargetOutputs(*stored)
        parts = self.args.micro_batches
        local = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), (texts, target_outputs))
        return processes.global_rows(self.mesh, local, axis=1)

    def advance(self) -> training.UpdateReport:
        """Starts an update; reading a value of the report waits for the devices."""
        self.state, report = self.update(self.state, self.frozen, *self._batch())
        self.step += 1
        return report

    def rows_of(self, documents: np.ndarray) -> str:
        """Describes the documents of a batch by their sources and row numbers, for messages."""
        documents = np.unique(documents[documents >= 0])
        of = self.corpus.source[documents]
        rows = {self.corpus.names[source]: self.corpus.row[documents[of == source]] for source in np.unique(of)}
        return "; ".join(f"{name} {' '.join(map(str, numbers))}" for name, numbers in rows.items())

    def save(self) -> None:
        """Starts to write a checkpoint of the current state."""
        state: dict[str, Any] = {"state": self.state}
        if self.frozen.feature_scale is not None:
            state["feature_scale"] = self.frozen.feature_scale
        positions = processes.gather_values(self.batches.get_state())
        self.checkpoints.save(self.step, state, {"settings": self.settings, "positions": positions})

    def finished_head(self) -> Params:
        """Returns the float32 parameters to write; for an EAGLE head `{"head": ..., "d2t": ...}`."""
        return self.learner.finished(self.state.head, self.frozen)

    def evaluate(self) -> tuple[float, list[float | None]]:
        """Measures the current head on the held-out prompts, and keeps it if it is the best so far.

        Returns:
          tau, tokens per target pass with the tree; n-alpha, acceptance rates of a drafted token after n = 0, 1, ...
          accepted drafted tokens.
        """
        params, target = self.finished_head(), self.target
        cast = jax.tree.map(
            lambda leaf: leaf.astype(target.dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params
        )
        if self.measured_on != self.mesh:
            weights, cast = respread((target.params, cast), self.measured_on)
            target = eagle_jax.Target.from_params(target.config, weights, target.name, self.measured_on)
        target = dataclasses.replace(target, config=dataclasses.replace(target.config, eos_ids=self.stops))
        head = self.learner.bind(cast, target)
        tokens = self.args.eval_tokens
        tau = eagle_jax.generate(target, head, self.prompts, max_new_tokens=tokens).tau
        alpha = measure_n_alpha(target, head, self.prompts, max_new_tokens=tokens).alpha
        notes = {"settings": self.settings, "measured": self.measured, "n_alpha": alpha}
        if self.checkpoints.save_best(self.step, params, notes, tau):
            self._write(params)
        return tau, alpha

    def export(self) -> tuple[Path, int]:
        """Writes the best head, or the last without a measurement; returns its directory and step."""
        saved = self.checkpoints.restore_best(self.finished_head())
        step, params = (self.step, self.finished_head()) if saved is None else (saved.step, saved.state)
        return self._write(params), step

    def _write(self, params: Params) -> Path:
        host, directory = processes.to_host(params), self.args.out / self.learner.folder
        if jax.process_index() == 0:
            note_run(self.args.out, self.args.target)
        self.learner.write(host, directory)
        return directory

    def flops(self) -> float:
        """Returns the operations of an update's matrix products: target, head and their gradients."""
        state, frozen = jax.eval_shape(lambda *trees: trees, self.state, self.frozen)
        return training.product_flops(functools.partial(self._update, None, False), state, frozen, *self.batch_shapes)
