"""The loop of a training run: updates, measurements and checkpoints in turn, until the last step or a signal."""

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
from eagle_jax.devices import exhausted, more_of
from eagle_jax.parallel import processes
from eagle_jax.training import host
from eagle_jax.training.step import UpdateReport
from infer.common.interrupts import heard
from train.loop.learners import Learner
from train.loop.log import RunLog
from train.loop.options import RunArgs
from train.loop.places import alone_in, check_own
from train.loop.run import Run


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
        heard()
        if self.number:
            raise KeyboardInterrupt
        self.number = number

    def at(self, step: int) -> int:
        """The signal that came, 0 without one; several processes agree on a step, through JAX's own notice."""
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            return int(signal.SIGTERM)
        return self.number


def judge(this: Run, step: int, report: UpdateReport, documents: np.ndarray) -> dict[str, Any]:
    """Waits for an update and returns what it saw.

    Raises:
      ValueError: its loss or gradient is not finite, or the gradient exploded; the batch is named, nothing is saved.
    """
    found = processes.to_host(report)
    loss, gradient = float(found.loss), float(found.gradient)
    if not math.isfinite(loss) or not gradient <= this.args.max_gradient:
        rows = "; ".join(part for part in processes.everyones(this.named(documents)) if part)
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

    known = any(processes.everyones(log.has_tau(this.step))) and this.checkpoints.best_tau is not None
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


def start(args: RunArgs, learner: Learner) -> int:
    """A run from its arguments, which were checked, to its end; the exit status.

    Raises:
      ConfigError, ValueError, CheckpointError: what is given does not fit together. MemoryError: a device is too small.
    """
    check_own(args.out, ("latest", "best", "data", "log.jsonl"), f"a run of train.{learner.program}")
    if args.features is not None and not (args.features / "layout.json").is_file():
        raise ConfigError(f"--features {args.features} holds no features: `python -m train.features` writes them")
    processes.initialise()
    if jax.default_backend() == "cpu":
        host.keep_freed_memory()
    for twice in ("absl", "asyncio"):  # Orbax reports what is raised to us as well
        logging.getLogger(twice).setLevel(logging.CRITICAL)
    leads = jax.process_index() == 0
    with alone_in(args.out, leads):
        if leads:
            sweep(args.out, args.out / "data")
        this = Run(args, learner)
        try:
            return learn(this)
        except jax.errors.JaxRuntimeError as error:
            if not exhausted(error):
                raise
            raise MemoryError(this.needed(more_of(str(error)))) from error


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
