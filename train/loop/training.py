"""Runs the updates, measurements and checkpoints of a run, until the last step or a signal."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from eagle_jax.checkpoints import sweep
from eagle_jax.parallel import processes
from eagle_jax.training import UpdateReport, keep_freed_memory
from infer.common.interrupts import mark_handled
from train.loop.learners import Learner
from train.loop.log import RunLog
from train.loop.options import RunArgs
from train.loop.places import alone_in
from train.loop.run import Run


@contextlib.contextmanager
def stop_signals() -> Iterator[Callable[[int], int]]:
    """Yields a function that returns, for a step, the signal to stop at, or 0.

    A first SIGTERM or Ctrl-C is recorded, a second one ends the run at once. With several processes, JAX's pre-emption
    sync point chooses a common step.
    """
    found: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        mark_handled()
        if found:
            raise KeyboardInterrupt
        found.append(number)

    def received(step: int) -> int:
        if jax.process_count() > 1:
            return int(signal.SIGTERM) if multihost_utils.reached_preemption_sync_point(step) else 0
        return found[0] if found else 0

    watched = (signal.SIGTERM, signal.SIGINT) if jax.process_count() == 1 else ()
    before = {number: signal.signal(number, note) for number in watched}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_update(run: Run, step: int, report: UpdateReport, documents: np.ndarray) -> dict[str, Any]:
    """Waits for an update, checks it and returns its record.

    Raises:
      ValueError: the loss or gradient is not finite, or the gradient exploded. That update is not saved.
    """
    found = processes.to_host(report)
    loss, gradient = float(found.loss), float(found.gradient)
    if not math.isfinite(loss) or not gradient <= run.args.max_gradient:
        rows = "; ".join(part for part in processes.gather_values(run.rows_of(documents)) if part)
        run.checkpoints.wait()  # a checkpoint that is still being written is kept as well
        last = run.checkpoints.step
        kept = "No checkpoint had been saved" if last is None else f"The checkpoint of step {last} is kept"
        raise ValueError(
            f"The loss must be finite and the gradient norm at most --max-gradient {run.args.max_gradient:g}, got "
            f"{loss:.4g} and {gradient:.4g} at step {step}. {kept}. Lower --rate, or remove these rows (numbered from "
            f"0): {rows}."
        )
    return {"loss": loss, "accuracy": found.metrics.accuracy.tolist(), "losses": found.metrics.loss.tolist(),
            "gradient": gradient}  # fmt: skip


def train_until_stopped(run: Run, log: RunLog, received: Callable[[int], int]) -> int:
    """Trains until `--steps` or a signal; returns the signal, or 0.

    Raises:
      ValueError: see `check_update`.
    """
    args = run.args
    pending: tuple[int, UpdateReport, np.ndarray] | None = None

    def settle() -> None:
        nonlocal pending
        if pending is not None:
            log.updated(pending[0], check_update(run, *pending))
            pending = None

    def is_due() -> bool:
        ends = run.step in (0, args.steps) or (args.eval_every > 0 and run.step % args.eval_every == 0)
        # Weights that were trained before are measured at step 0 as well.
        return bool(args.heldout) and ends and (run.step > 0 or args.init is not None)

    def measure() -> None:
        logging.info("measuring tau on %d prompts ...", len(run.prompts))
        with log.pause():
            tau, n_alpha = run.evaluate()
        log.evaluated(run.step, tau, n_alpha)

    measured = any(processes.gather_values(log.has_tau(run.step))) and run.checkpoints.best_tau is not None
    if is_due() and not measured:
        # The run was killed between save and measurement, or the way of measuring tau changed.
        measure()
    while run.step < args.steps:
        report = run.advance()
        settle()  # the update before, while the device computes this one
        pending = (run.step, report, run.batches.documents)
        number = received(run.step)
        last = run.step == args.steps
        if is_due() or last or number or run.step % args.save_every == 0:
            settle()  # only checked updates are saved or measured
            with log.pause():
                run.save()  # before the measurement, which takes long and can be repeated
        if number and not last:
            return number
        if is_due():
            measure()
    return 0


def start(args: RunArgs, learner: Learner) -> int:
    """Trains to the end, writes the head and prints the report; returns the exit status.

    Raises:
      ConfigError, ValueError, CheckpointError: the arguments or files do not fit together.
    """
    processes.initialise()
    if jax.default_backend() == "cpu":
        keep_freed_memory()
    for name in ("absl", "asyncio"):  # Orbax logs exceptions that it also raises
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with alone_in(args.out, ("latest", "best", "data"), f"a run of train.{learner.program}"):
        if jax.process_index() == 0:
            sweep(args.out, args.out / "data")
        run = Run(args, learner)
        run.prepare()
        log = RunLog(run)
        start_time, start_step = time.perf_counter(), run.step
        with contextlib.ExitStack() as ends:
            ends.callback(run.checkpoints.wait)  # otherwise the process would end in the middle of a save
            ends.callback(log.close)
            number = train_until_stopped(run, log, ends.enter_context(stop_signals()))
        if number:
            logging.info("stopped at step %d and saved; the same command continues from there", run.step)
            return 128 + number
        path, step = run.export()
        run.checkpoints.close()
        if jax.process_index() == 0:
            best = {} if run.checkpoints.best_tau is None else {"tau": round(run.checkpoints.best_tau, 3)}
            report = {"steps": run.step, **log.record, **best, "head": str(path), "head_step": step,
                      "coverage": round(run.coverage, 4), "seconds": round(time.perf_counter() - start_time, 1),
                      "updates_here": run.step - start_step, **log.speed}  # fmt: skip
            print(json.dumps(report))
        return 0
