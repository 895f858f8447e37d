"""Runs the loop of a training run: updates, measurements and checkpoints, until the last step or a signal."""

from __future__ import annotations

import json
import logging
import math
import signal
import time
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from eagle_jax.checkpoints.files.staging import sweep
from eagle_jax.config import ConfigError
from eagle_jax.devices import is_out_of_memory, shortage
from eagle_jax.parallel import processes
from eagle_jax.training import host
from eagle_jax.training.step import UpdateReport
from infer.common.interrupts import mark_handled
from train.loop.learners import Learner
from train.loop.log import RunLog
from train.loop.options import RunArgs
from train.loop.places import alone_in, check_own
from train.loop.run import Run


class StopRequest(Exception):  # noqa: N818 - not an error
    """SIGTERM or Ctrl-C; the run has saved a checkpoint."""

    def __init__(self, number: int) -> None:
        super().__init__(f"signal {number}")
        self.number = number


class StopSignals:
    """Records SIGTERM and Ctrl-C: the first one saves and ends the run, the second one ends it at once."""

    def __init__(self) -> None:
        self.number = 0
        watched = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
        self._before = {number: signal.signal(number, self._note) for number in watched}

    def restore(self) -> None:
        """Restores the previous handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        mark_handled()
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def received(self, step: int) -> int:
        """Returns the signal, or 0. Several processes agree on a step by JAX's pre-emption notice."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            return int(signal.SIGTERM)
        return self.number


def judge(this: Run, step: int, report: UpdateReport, documents: np.ndarray) -> dict[str, Any]:
    """Waits for an update, checks it and returns its record.

    Raises:
      ValueError: the loss or gradient is not finite, or the gradient exploded. Nothing of it is saved.
    """
    found = processes.to_host(report)
    loss, gradient = float(found.loss), float(found.gradient)
    if not math.isfinite(loss) or not gradient <= this.args.max_gradient:
        rows = "; ".join(part for part in processes.everyones(this.rows_of(documents)) if part)
        this.checkpoints.wait()  # a checkpoint that is still being written is kept as well
        last = this.checkpoints.step
        kept = "no checkpoint had been saved" if last is None else f"the checkpoint of step {last} is kept"
        raise ValueError(
            f"step {step}: loss {loss:.4g}, gradient norm {gradient:.4g} (--max-gradient {this.args.max_gradient:g}); "
            f"the batch held the rows (from 0) {rows}. {kept}. Lower --rate, or remove these rows."
        )
    if not float(found.metrics.counted[0]):
        logging.warning("step %d taught nothing: no supervised token of its rows follows two others", step)
    return {"loss": loss, "accuracy": found.metrics.accuracy.tolist(), "losses": found.metrics.loss.tolist(),
            "gradient": gradient}  # fmt: skip


def train(this: Run, log: RunLog, signals: StopSignals) -> dict[str, Any]:
    """Trains until `--steps`; returns the record of the last update, which an earlier call may have made.

    Raises:
      StopRequest: a signal was received and everything is saved. ValueError: see `judge`.
    """
    args = this.args
    pending: tuple[int, UpdateReport, np.ndarray] | None = None
    record = log.last()

    def settle() -> None:
        nonlocal pending, record
        if pending is not None:
            record = judge(this, *pending)
            log.updated(pending[0], record)
            pending = None

    def is_due() -> bool:
        ends = this.step in (0, args.steps) or (args.eval_every > 0 and this.step % args.eval_every == 0)
        # Weights that were trained before are measured at step 0 as well.
        return bool(args.heldout) and ends and (this.step > 0 or args.init is not None)

    def measure() -> None:
        logging.info("measuring tau on %d prompts ...", len(this.prompts))
        start = time.perf_counter()
        log.evaluated(this.step, this.evaluate(), time.perf_counter() - start)
        log.figure()

    measured = any(processes.everyones(log.has_tau(this.step))) and this.checkpoints.best_tau is not None
    if is_due() and not measured:
        measure()  # a kill came between save and measurement, or tau is measured in another way from now on
    while this.step < args.steps:
        report = this.advance()
        settle()  # the update before, while the device computes this one
        pending = (this.step, report, this.batches.documents)
        received = signals.received(this.step)
        last = this.step == args.steps
        if is_due() or last or received or this.step % args.save_every == 0:
            settle()  # only checked updates are saved or measured
            start = time.perf_counter()
            this.save()  # before the measurement, which takes long and can be repeated
            log.pause(time.perf_counter() - start)
        if received and not last:
            this.checkpoints.wait()
            raise StopRequest(received)
        if is_due():
            measure()
    return record


def start(args: RunArgs, learner: Learner) -> int:
    """Runs a training from checked arguments to its end; returns the exit status.

    Raises:
      ConfigError, ValueError, CheckpointError: the arguments or files do not fit together.
      MemoryError: a device is too small.
    """
    check_own(args.out, ("latest", "best", "data", "log.jsonl"), f"a run of train.{learner.program}")
    if args.features is not None and not (args.features / "layout.json").is_file():
        raise ConfigError(
            f"--features must be a directory that train.features wrote, got {args.features}. Run it first."
        )
    processes.initialise()
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    for name in ("absl", "asyncio"):  # Orbax logs exceptions that it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    leads = jax.process_index() == 0
    with alone_in(args.out, leads):
        if leads:
            sweep(args.out, args.out / "data")
        this = Run(args, learner)
        try:
            return learn(this)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MemoryError(this.memory_message(shortage(str(error)))) from error


def learn(this: Run) -> int:
    """Trains a prepared run to its end, writes the head, prints the report; returns the exit status."""
    this.prepare()
    log = RunLog(this)
    signals = StopSignals()
    start = time.perf_counter()
    begun = this.step
    try:
        record = train(this, log, signals)
    except StopRequest as stopped:
        logging.info("stopped at step %d and saved; the same command continues from there", this.step)
        return 128 + stopped.number
    except Exception:
        this.checkpoints.wait()  # otherwise the process would end in the middle of a save
        raise
    finally:
        log.close()
        signals.restore()
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
