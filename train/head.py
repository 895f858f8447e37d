"""Trains a draft head on a frozen target.

    python -m train.head --config configs/tiny_cpu.yaml
    python -m train.head --config configs/llama31_8b.yaml --steps 2000 --out runs/mine

`--method` chooses the papers' objective (eagle3, eagle1, hass); every number of it can be set. Data are conversations
(JSONL, Parquet, datasets of the hub), see `eagle_jax.data.sources`. Several processes, as on a TPU pod, run the same
command. A run that was stopped goes on where it was when the same command is given again. `--out` holds checkpoints
(`latest/`, `best/`), `head/` (official layout; the best by tau), `log.jsonl` and `figure.png`. The last line printed is
one JSON object.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils

from eagle_jax import distributed
from eagle_jax.checkpoints.staging import sweep
from eagle_jax.data.sources import Source
from eagle_jax.measure import use_compilation_cache
from eagle_jax.programs import at_least_one, not_negative, run
from eagle_jax.training import host
from eagle_jax.training.step import UpdateReport
from train.log import RunLog
from train.places import alone_in
from train.run import Run
from train.setup import check_places


@dataclasses.dataclass(frozen=True)
class Args:
    """Arguments of the program; None takes the method's own value.

    Attributes:
      target: path or hub id of the model, frozen; demo is the bundled one.
      data: sources `path[#split][@weight]` of conversations.
      out: the run's directory.
      tokenizer: path or hub id, if it is not beside the target.
      chat_template: Jinja file, for a tokenizer without one (Vicuna).
      heldout: sources whose prompts tau is measured on; never trained on.
      features: directory of `train.features`, instead of running the target.
      method: objective and kind of head.
      steps: updates.
      unroll: steps of the head on its own outputs; eagle3 7, hass 3, eagle1 1.
      decay: weight of each step over the one before; eagle3 0.8, else 1.
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
      head_intermediate: width of the head's MLP, 0 for the target's.
      init: a trained head to start from (path, hub id, demo); its taps, draft vocabulary and width are taken over.
      rate: peak learning rate.
      warmup: updates until it is reached.
      clip: largest norm of a gradient.
      max_gradient: a gradient above this norm (before clipping) stops the run.
      rows: packed rows per update, over all processes.
      micro_batches: parts of an update that are computed one after the other.
      length: tokens per row.
      chunk: rows of a text whose logits exist at once; 256.
      remat: compute activations of the unrolled steps again for their gradient; True.
      dtype: of products and activations of head and target; master weights and optimiser state are float32.
      data_axis: devices along "data"; 0 takes what the other two leave.
      fsdp: devices along "fsdp".
      tensor: devices along "tensor".
      seed: of weights, order and noise.
      log_every: updates per line of the log.
      save_every: updates per checkpoint.
      keep: latest checkpoints that stay.
      eval_every: updates per measurement of tau; 0 measures at the end only.
      eval_prompts: held-out prompts per measurement.
      eval_tokens: tokens per reply of a measurement.
      eval_tree: depth,top_k,num_nodes of its drafts.
      tensorboard: write `tensorboard/`.
      wandb: project of Weights & Biases to report to.
    """

    target: str
    data: tuple[str, ...]
    out: Path
    tokenizer: str | None = None
    chat_template: Path | None = None
    heldout: tuple[str, ...] = ()
    features: Path | None = None
    method: Literal["eagle3", "eagle1", "hass"] = "eagle3"
    steps: int = 1000
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
    init: str | None = None
    rate: float = 1e-4
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
    keep: int = 2
    eval_every: int = 0
    eval_prompts: int = 16
    eval_tokens: int = 128
    eval_tree: str = "6,10,59"
    tensorboard: bool = True
    wandb: str | None = None


class StopRequest(Exception):  # noqa: N818 - nothing went wrong
    """SIGTERM or Ctrl-C, answered with a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class Requests:
    """Whether someone asked the run to stop: at the first signal it saves and ends, at the second it ends at once."""

    def __init__(self) -> None:
        self.number = 0
        watched = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
        self._before = {number: signal.signal(number, self._note) for number in watched}

    def forget(self) -> None:
        """Signals mean again what they meant before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def at(self, step: int) -> int:
        """The signal that came, 0 without one; several processes agree on a step, through JAX's own notice."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            return int(signal.SIGTERM)
        return self.number


def check(args: Args) -> None:
    """Refuses numbers that cannot be meant.

    Raises:
      ValueError: naming the option.
    """
    at_least_one(args, "steps", "rows", "micro_batches", "length", "log_every", "save_every", "keep", "fsdp", "tensor",
                 "eval_prompts", "eval_tokens", "unroll", "chunk", "warmup")  # fmt: skip
    not_negative(args, "seed", "draft_vocab", "decay", "eta", "token_weight", "feature_weight", "noise", "eval_every",
                 "head_intermediate", "data_axis")  # fmt: skip
    if (args.decay or 0) > 1:
        raise ValueError(f"--decay {args.decay} must be at most 1: it is the weight of each step over the one before")
    if not args.data:
        raise ValueError("--data names no source: give JSONL or Parquet files, or datasets of the hub")
    for name in ("rate", "clip", "max_gradient"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be above 0")
    if args.wandb is not None and find_spec("wandb") is None:
        raise ValueError("--wandb needs the package of that name: pip install wandb")
    if args.eval_every and not args.heldout:
        raise ValueError("--eval-every needs --heldout: prompts to measure tau on")
    if args.method != "eagle3":
        for name in ("fc_norm", "norm_output", "taps"):
            if getattr(args, name):
                raise ValueError(f"--{name.replace('_', '-')} is of --method eagle3, and the method is {args.method}")
    if args.eta is not None and args.token_loss != "lk_blend":
        raise ValueError("--eta is of --token-loss lk_blend")
    if args.heldout and args.eval_tokens >= args.length:
        raise ValueError(f"--eval-tokens {args.eval_tokens} must be below --length {args.length}")
    sources = [[Source.parse(text) for text in texts] for texts in (args.data, args.heldout)]
    given = [{str(at) for one in part for at in (one.name, *map(Path.resolve, one.files))} for part in sources]
    if both := sorted(set.intersection(*given)):
        raise ValueError(f"{both[0]} is in --data and in --heldout: what tau is measured on must not be trained on")


def judge(this: Run, step: int, report: UpdateReport, documents: np.ndarray) -> dict[str, Any]:
    """Waits for an update and returns what it saw.

    Raises:
      ValueError: its loss or gradient is not finite, or the gradient exploded; the batch is named, nothing is saved.
    """
    found = distributed.to_host(report)
    loss, gradient = float(found.loss), float(found.gradient)
    if not math.isfinite(loss) or not gradient <= this.args.max_gradient:
        rows = "; ".join(part for part in distributed.everyones(this.named(documents)) if part)
        this.checkpoints.wait()  # one that is still being written is kept as well
        last = this.checkpoints.step
        kept = "no checkpoint had been saved" if last is None else f"the checkpoint of step {last} is kept"
        raise ValueError(
            f"step {step}: loss {loss:.4g}, norm of the gradient {gradient:.4g} (--max-gradient "
            f"{this.args.max_gradient:g}); the batch held the rows (from 0) {rows}. {kept}. Lower --rate, or leave "
            "these rows out"
        )
    if not float(found.metrics.counted[0]):
        logging.warning("step %d taught nothing: no supervised token of its rows follows two others", step)
    return {"loss": loss, "accuracy": found.metrics.accuracy.tolist(), "losses": found.metrics.loss.tolist(),
            "gradient": gradient}  # fmt: skip


def train(this: Run, log: RunLog, requests: Requests) -> dict[str, Any]:
    """Updates until `--steps`; what the last one saw, of an earlier call where there was nothing left to do.

    Raises:
      StopRequest: a signal came; everything is saved. ValueError: see `judge`.
    """
    args = this.args
    before: tuple[int, UpdateReport, np.ndarray] | None = None
    record = log.last()

    def settle() -> None:
        nonlocal before, record
        if before is not None:
            record = judge(this, *before)
            log.updated(before[0], record)
            before = None

    def due() -> bool:
        ends = this.step in (0, args.steps) or (args.eval_every > 0 and this.step % args.eval_every == 0)
        # What a run begins with is worth measuring where it was trained before.
        return bool(args.heldout) and ends and (this.step > 0 or args.init is not None)

    def measure() -> None:
        logging.info("measuring tau on %d prompts ...", len(this.prompts))
        start = time.perf_counter()
        log.evaluated(this.step, this.evaluate(), time.perf_counter() - start)
        log.figure()

    known = any(distributed.everyones(log.has_tau(this.step))) and this.checkpoints.best_tau is not None
    if due() and not known:
        measure()  # what was saved and not measured any more, or is measured in another way from now on
    while this.step < args.steps:
        report = this.advance()
        settle()  # of the update before: this one is being computed meanwhile
        before = (this.step, report, this.batches.documents)
        signalled = requests.at(this.step)
        last = this.step == args.steps
        if due() or last or signalled or this.step % args.save_every == 0:
            settle()  # nothing is saved or measured that was not looked at
            start = time.perf_counter()
            this.save()  # first: a measurement takes long, and can be made up for
            log.pause(time.perf_counter() - start)
        if signalled and not last:
            this.checkpoints.wait()
            raise StopRequest(signalled)
        if due():
            measure()
    return record


def main(args: Args) -> int:
    """Trains, measures, writes the head."""
    check(args)
    check_places(args)
    distributed.initialise()
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    for twice in ("absl", "asyncio"):  # Orbax reports what is raised to us as well
        logging.getLogger(twice).setLevel(logging.CRITICAL)
    leads = jax.process_index() == 0
    with alone_in(args.out, leads):
        if leads:
            sweep(args.out, args.out / "data")
        return learn(Run(args))


def learn(this: Run) -> int:
    """From the run as it stands to its end; the exit status."""
    this.prepare()
    log = RunLog(this)
    requests = Requests()
    start = time.perf_counter()
    begun = this.step
    try:
        record = train(this, log, requests)
    except StopRequest as stopped:
        logging.info("stopped at step %d and saved; the same command goes on from there", this.step)
        return 128 + stopped.number
    except Exception:
        this.checkpoints.wait()  # the process would end in the middle of a save
        raise
    finally:
        log.close()
        requests.forget()
    path, step = this.export()
    this.checkpoints.close()
    log.figure()
    if jax.process_index() == 0:
        best = {} if this.checkpoints.best_tau is None else {"tau": round(this.checkpoints.best_tau, 3)}
        report = {"steps": this.step, **record, **best, "head": str(path), "head_step": step,
                  "coverage": round(this.coverage, 4), "seconds": round(time.perf_counter() - start, 1),
                  "updates_here": this.step - begun, **log.speed}  # fmt: skip
        print(json.dumps(report))
    return 0


if __name__ == "__main__":
    use_compilation_cache()
    run(main, Args, __doc__, log="timed")
