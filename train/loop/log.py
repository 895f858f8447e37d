"""Logs the progress of long programs, and of training runs also to `log.jsonl` and TensorBoard."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from eagle_jax.checkpoints import write_whole
from eagle_jax.training import peak_flops
from train.loop.run import Run

COVERED = 0.9
"""Share of the supervised tokens below which a draft vocabulary causes a warning."""


class RunLog:
    """Logs a run while it trains. Only the first process writes."""

    def __init__(self, run: Run) -> None:
        self.args = run.args
        self.leads = jax.process_index() == 0
        self.path = run.args.out / "log.jsonl"
        self.flops, self.peak = run.flops(), peak_flops(run.args.dtype)
        self.paused = 0.0
        # Training time and step at the first update of this call, whose own time is compilation, and at the last line.
        self.first: tuple[float, int] | None = None
        self.last: tuple[float, int] | None = None
        self.record: dict[str, Any] = {}  # losses of the last checked update, which an earlier call may have made
        self.board: Any = None
        if not self.leads:
            return
        kept = [line for line in read(self.path) if line["step"] <= run.step]  # a killed run logged more
        write_whole(self.path, "".join(json.dumps(line) + "\n" for line in kept))
        if updates := [line for line in kept if "loss" in line]:
            self.record = {name: updates[-1][name] for name in ("loss", "accuracy", "losses", "gradient")}
        if self.args.tensorboard:
            from tensorboardX import SummaryWriter

            self.board = SummaryWriter(str(self.args.out / "tensorboard"), purge_step=run.step + 1)
        log_beginning(run, self.peak)

    def updated(self, step: int, record: dict[str, Any]) -> None:
        """Counts a checked update; logs every `--log-every` of them."""
        self.record = record
        now = (time.perf_counter() - self.paused, step)
        self.first, self.last = self.first or now, self.last or now
        if not self.leads or (step % self.args.log_every and step != self.args.steps):
            return
        shown = f"loss {record['loss']:.3f}, accuracy {' '.join(f'{value:.2f}' for value in record['accuracy'])}"
        if speed := self._speed(self.last, now):
            left = (self.args.steps - step) * (now[0] - self.last[0]) / (step - self.last[1]) / 60
            shown += f", {speed['tokens_s']:.0f} tokens/s, {left:.1f} minutes left"
            shown += f", mfu {100 * speed['mfu']:.1f}%" if "mfu" in speed else ""
        self.last = now
        self._write({"step": step, **record, **speed})
        logging.info("step %d of %d: %s", step, self.args.steps, shown)

    def evaluated(self, step: int, tau: float, n_alpha: list[float | None]) -> None:
        """Logs a measurement."""
        if self.leads:
            self._write({"step": step, "tau": tau, "n_alpha": n_alpha})
            alpha = " ".join("-" if value is None else f"{value:.2f}" for value in n_alpha)
            logging.info("step %d: tau %.3f, n-alpha %s", step, tau, alpha)

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes the time of a save or a measurement from the training time."""
        start = time.perf_counter()
        yield
        self.paused += time.perf_counter() - start

    def has_tau(self, step: int) -> bool:
        """Returns whether the log has the tau of a step; False on every process but the first."""
        return self.leads and any(line["step"] == step for line in read(self.path) if "tau" in line)

    @property
    def speed(self) -> dict[str, float]:
        """Returns tokens/s and share of the devices' peak, of all logged updates of this call but the first."""
        return self._speed(self.first, self.last)

    def _speed(self, begin: tuple[float, int] | None, end: tuple[float, int] | None) -> dict[str, float]:
        if begin is None or end is None or begin[1] == end[1]:
            return {}
        seconds = (end[0] - begin[0]) / (end[1] - begin[1])
        found = {"tokens_s": round(self.args.rows * self.args.length / seconds, 1)}
        mfu = round(self.flops / seconds / self.peak, 4)
        # Above 1 the peak is wrong: the machine was busy when it was measured.
        return found if mfu > 1 else {**found, "mfu": mfu}

    def close(self) -> None:
        """Closes the writer of TensorBoard."""
        if self.board is not None:
            self.board.close()

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        if self.board is None:
            return
        for name, value in record.items():
            values = {f"{name}/{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {name: value}
            for key, number in values.items():
                if number is not None and name != "step":
                    self.board.add_scalar(key, number, record["step"])
        self.board.flush()  # a killed run would lose minutes


def log_beginning(run: Run, peak: float) -> None:
    """Logs the data and the parameters of a run, and warns of lost data."""
    args, corpus = run.args, run.corpus
    documents = {name: corpus.of(name) for name in corpus.names}
    drawn = run.weights or {name: len(found) for name, found in documents.items()}
    for name, found in documents.items() if len(documents) > 1 else ():
        logging.info(
            "%s: %d documents, %d tokens, %.1f%% of what is drawn",
            name, len(found), corpus.lengths[found].sum(), 100 * drawn[name] / sum(drawn.values()),
        )  # fmt: skip
    if cut := int(np.sum(np.diff(corpus.starts) > args.length)):
        logging.info("%d of %d documents are longer than --length %d and end there", cut, len(corpus), args.length)
    if late := int(np.sum(~corpus.has_loss_within(args.length))):
        logging.info("%d of them hold no supervised token before that and are left out", late)
    if run.coverage < COVERED:
        logging.warning("the draft vocabulary holds only %.1f%% of the supervised tokens. Raise --draft-vocab.",
                        100 * run.coverage)  # fmt: skip
    parameters = sum(leaf.size for leaf in jax.tree.leaves(run.state.head))
    logging.info(
        "%.1fM parameters; draft vocabulary covers %.1f%% of the supervised tokens; %d documents, %d tokens per "
        "update; from step %d of %d; the peak for mfu is %.0f GFLOP/s",
        parameters / 1e6, 100 * run.coverage, len(corpus), args.rows * args.length, run.step, args.steps, peak / 1e9,
    )  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    """Reads the lines of a log, without a last line that a kill cut off."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.is_file() else []


class _LogLines(io.TextIOBase):
    """Writes the states of a bar as log lines."""

    def write(self, text: str) -> int:
        if line := text.strip():
            logging.info("%s", line)
        return len(text)


def progress_bar(total: int, done: int, unit: str) -> tqdm[Any]:
    """Returns a bar over `total` units, or log lines without a terminal; an earlier call did `done` units."""
    if done:
        logging.info("%d of %d %s exist already", done, total, unit)
    options: dict[str, Any] = {"total": total, "initial": done, "unit": f" {unit}"}
    if not sys.stderr.isatty():
        shape = "{n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left"
        options |= {"file": _LogLines(), "mininterval": 30.0, "maxinterval": 30.0, "bar_format": shape}
    return tqdm(**options)
