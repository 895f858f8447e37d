"""Logs a training run: progress, `log.jsonl`, TensorBoard, Weights & Biases and a figure at the end."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from tqdm.auto import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from eagle_jax.checkpoints.files.staging import write_whole
from eagle_jax.training.flops import SIZE, known_peak, peak_flops
from train.loop.figure import draw

if TYPE_CHECKING:
    from train.loop.run import Evaluation, Run

COVERED = 0.9
"""Share of the supervised tokens below which a draft vocabulary causes a warning."""


class RunLog:
    """Logs a run while it trains. Only the first process writes.

    Raises:
      ValueError: `log.jsonl` exists and is not the log of a run.
    """

    def __init__(self, this: Run) -> None:
        self.args = this.args
        self.leads = jax.process_index() == 0
        self.path = this.args.out / "log.jsonl"
        self.flops, self.peak = this.flops(), peak_flops(this.args.dtype)
        self.tokens = this.args.rows * this.args.length
        self.mark: float | None = None  # set by the first update, whose time is compilation
        self.marked, self.paused = this.step, 0.0
        self.seconds, self.updates = 0.0, 0  # training time and updates behind the first
        self._sinks: list[Callable[[int, dict[str, float]], None]] = []
        self._closing = contextlib.ExitStack()
        if self.leads:
            truncate(self.path, this.step)
            self._open_writers(this)
            self.bar = tqdm(total=this.args.steps, initial=this.step, unit=" updates", disable=not sys.stderr.isatty())
            self._closing.callback(self.bar.close)
            self._closing.enter_context(logging_redirect_tqdm())
            log_beginning(this, self.peak)

    def _open_writers(self, this: Run) -> None:
        args = this.args
        if args.wandb is not None:
            import wandb

            name = args.out / "wandb.id"  # a resumed run continues the same run there
            if not name.is_file():
                write_whole(name, uuid.uuid4().hex)
            run = wandb.init(
                project=args.wandb, name=args.out.name, config=this.settings, id=name.read_text("utf-8"), resume="allow"
            )
            self._sinks.append(lambda step, scalars: run.log(scalars, step=step))
            self._closing.callback(run.finish)
        if args.tensorboard:
            from tensorboardX import SummaryWriter

            board = SummaryWriter(str(args.out / "tensorboard"), purge_step=this.step + 1)
            self._closing.callback(board.close)

            def write(step: int, scalars: dict[str, float]) -> None:
                for name, value in scalars.items():
                    board.add_scalar(name, value, step)
                board.flush()  # a killed run would lose minutes

            self._sinks.append(write)

    def updated(self, step: int, record: dict[str, Any]) -> None:
        """Counts a checked update; logs every `--log-every` of them."""
        if not self.leads:
            return
        self.bar.update(step - self.bar.n)
        now = time.perf_counter()
        if self.mark is None:
            self.mark, self.marked, self.paused = now, step, 0.0
        if step % self.args.log_every and step != self.args.steps:
            return
        speed: dict[str, float] = {}
        shown = {"loss": f"{record['loss']:.3f}", "accuracy": " ".join(f"{value:.2f}" for value in record["accuracy"])}
        if step > self.marked:
            spent, updates = now - self.mark - self.paused, step - self.marked
            self.seconds, self.updates = self.seconds + spent, self.updates + updates
            self.mark, self.marked, self.paused = now, step, 0.0
            speed = self._speed(spent / updates)
            left = (self.args.steps - step) * spent / updates / 60
            shown |= {"tok/s": f"{speed['tokens_s']:.0f}", "minutes left": f"{left:.1f}"}
            if "mfu" in speed:
                shown["mfu"] = f"{100 * speed['mfu']:.1f}%"
        self._write({"step": step, **record, **speed})
        self.bar.set_postfix(shown)
        if self.bar.disable:
            values = ", ".join(f"{name} {value}" for name, value in shown.items())
            logging.info("step %d of %d: %s", step, self.args.steps, values)

    def pause(self, seconds: float) -> None:
        """Excludes seconds since the last update from the training time."""
        self.paused += seconds

    def evaluated(self, step: int, found: Evaluation, seconds: float) -> None:
        """Logs a measurement; excludes its time from the training time."""
        self.pause(seconds)
        if self.leads:
            self._write({"step": step, "tau": found.tau, "n_alpha": found.n_alpha})
            alpha = " ".join("-" if value is None else f"{value:.2f}" for value in found.n_alpha)
            logging.info("step %d: tau %.3f, n-alpha %s", step, found.tau, alpha)

    def has_tau(self, step: int) -> bool:
        """Returns whether the log has the tau of a step; False on every process but the first."""
        return self.leads and any(line["step"] == step for line in read(self.path) if "tau" in line)

    def last(self) -> dict[str, Any]:
        """Returns what the last logged update recorded."""
        lines = [line for line in read(self.path) if "loss" in line] if self.leads else []
        return {name: lines[-1][name] for name in ("loss", "accuracy", "losses", "gradient")} if lines else {}

    @property
    def speed(self) -> dict[str, float]:
        """Tokens per second and share of the devices' peak, over all updates of this call but the first."""
        return self._speed(self.seconds / self.updates) if self.updates else {}

    def _speed(self, seconds: float) -> dict[str, float]:
        speed, mfu = {"tokens_s": round(self.tokens / seconds, 1)}, round(self.flops / seconds / self.peak, 4)
        # Above 1 the peak is wrong: the machine was busy when it was measured.
        return speed if mfu > 1 else {**speed, "mfu": mfu}

    def figure(self) -> None:
        """Draws the run so far."""
        if self.leads:
            draw(read(self.path), self.args.out / "figure.png", self.args.out.name)

    def close(self) -> None:
        """Closes the bar and the writers."""
        self._closing.close()

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        scalars: dict[str, float] = {}
        for name, value in record.items():
            values = {f"{name}/{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {name: value}
            scalars |= {key: each for key, each in values.items() if each is not None}
        step = int(scalars.pop("step"))
        for sink in self._sinks:
            sink(step, scalars)


def log_beginning(this: Run, peak: float) -> None:
    """Logs what a run reads and trains, and warns of what is lost."""
    args, corpus = this.args, this.corpus
    documents = {name: corpus.of(name) for name in corpus.names}
    drawn = this.weights or {name: len(found) for name, found in documents.items()}
    for name, found in documents.items() if len(documents) > 1 else ():
        logging.info(
            "%s: %d documents, %d tokens, %.1f%% of what is drawn",
            name, len(found), corpus.lengths[found].sum(), 100 * drawn[name] / sum(drawn.values()),
        )  # fmt: skip
    if cut := int(np.sum(np.diff(corpus.starts) > args.length)):
        logging.info("%d of %d documents are longer than --length %d and end there", cut, len(corpus), args.length)
    if late := int(np.sum(~corpus.teaches_within(args.length))):
        logging.info("%d of them hold no supervised token before that and are left out", late)
    if known_peak() is None:
        logging.info(
            "this device's peak is not known: mfu is the share of what a product of %d x %d reaches, %.0f GFLOP/s",
            SIZE, SIZE, peak / 1e9,
        )  # fmt: skip
    if this.coverage < COVERED:
        logging.warning(
            "the draft vocabulary holds only %.1f%% of the supervised tokens. Raise --draft-vocab.",
            100 * this.coverage,
        )
    logging.info(
        "%s; %.1fM parameters; draft vocabulary covers %.1f%% of the supervised tokens; %d documents, %d tokens per "
        "update; from step %d of %d",
        this.learner.describe(this.target.config), this.parameters() / 1e6, 100 * this.coverage, len(corpus),
        args.rows * args.length, this.step, args.steps,
    )  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log, without a last line that a kill cut off.

    Raises:
      ValueError: the file is not the log of a run.
    """
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if any("step" not in line for line in lines):
            raise ValueError("a line without a step")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the log of a training run ({error}). Move it away.") from error
    return lines


def truncate(path: Path, step: int) -> None:
    """Removes the lines that a killed run logged after its last checkpoint."""
    kept = [line for line in read(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
