"""What a run tells: a progress bar, `log.jsonl`, TensorBoard, Weights & Biases, and a figure at the end."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
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
"""Share of the supervised tokens below which a draft vocabulary is warned of."""


class RunLog:
    """Tells of a run as it goes on; on every process but the first it is silent.

    Raises:
      ValueError: `log.jsonl` is there and not of a run.
    """

    def __init__(self, this: Run) -> None:
        self.args = args = this.args
        self.leads = jax.process_index() == 0
        self.path = args.out / "log.jsonl"
        self.flops, self.peak = this.flops(), peak_flops(args.dtype)
        self.tokens = args.rows * args.length
        self.mark: float | None = None  # set by the first update, whose time is the compiler's
        self.marked = this.step
        self.paused = 0.0
        self.seconds, self.updates = 0.0, 0
        """Of the updates since that mark; saving and measuring do not count."""
        self._board = self._wandb = None
        if not self.leads:
            return
        if args.wandb is not None:
            import wandb

            name = args.out / "wandb.id"  # a run that goes on is the same run there
            if not name.is_file():
                write_whole(name, uuid.uuid4().hex)
            options: dict[str, Any] = {"id": name.read_text(encoding="utf-8"), "resume": "allow"}
            self._wandb = wandb.init(project=args.wandb, name=args.out.name, config=this.settings, **options)
        if args.tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(args.out / "tensorboard"), purge_step=this.step + 1)
        truncate(self.path, this.step)
        self.bar = tqdm(total=args.steps, initial=this.step, unit=" updates", disable=not sys.stderr.isatty())
        self._redirect = logging_redirect_tqdm()
        self._redirect.__enter__()
        for told in shares(this) if len(this.corpus.names) > 1 else ():
            logging.info("%s", told)
        if cut := int(np.sum(np.diff(this.corpus.starts) > args.length)):
            logging.info(
                "%d of %d documents are longer than --length %d and end there", cut, len(this.corpus), args.length
            )
        if late := int(np.sum(~this.corpus.teaches_within(args.length))):
            logging.info("%d of them hold nothing to learn before that and are left out", late)
        if known_peak() is None:
            logging.info(
                "this device's peak is not known: mfu is the share of what a product of %d x %d reaches, %.0f GFLOP/s",
                SIZE, SIZE, self.peak / 1e9,
            )  # fmt: skip
        reached = f", {100 * this.coverage:.1f}% of what is supervised" if this.d2t is not None else ""
        if this.coverage < COVERED:
            logging.warning(
                "the draft vocabulary reaches %.1f%% of what is supervised, the rest can never be drafted: a larger "
                "--draft-vocab would", 100 * this.coverage
            )  # fmt: skip
        logging.info(
            "%s%s; %.1fM parameters; %d documents, %d tokens per update; from step %d of %d",
            this.learner.told(this.target.config), reached, this.parameters() / 1e6, len(this.corpus), self.tokens,
            this.step, args.steps,
        )  # fmt: skip

    def updated(self, step: int, record: dict[str, Any]) -> None:
        """An update is done and found sound."""
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
            seconds = spent / updates
            self.seconds, self.updates = self.seconds + spent, self.updates + updates
            self.mark, self.marked, self.paused = now, step, 0.0
            speed = self._speed(seconds)
            shown |= {"tok/s": f"{speed['tokens_s']:.0f}", "mfu": f"{100 * speed['mfu']:.1f}%",
                      "minutes left": f"{(self.args.steps - step) * seconds / 60:.1f}"}  # fmt: skip
        self._write({"step": step, **record, **speed})
        self.bar.set_postfix(shown)
        if self.bar.disable:
            told = ", ".join(f"{name} {value}" for name, value in shown.items())
            logging.info("step %d of %d: %s", step, self.args.steps, told)

    def pause(self, seconds: float) -> None:
        """So much of the time since the last update was no training."""
        self.paused += seconds

    def evaluated(self, step: int, found: Evaluation, seconds: float) -> None:
        """Takes down a tau; the time it took counts as no training time."""
        self.pause(seconds)
        if self.leads:
            self._write({"step": step, "tau": found.tau, "n_alpha": found.n_alpha})
            alpha = " ".join("-" if value is None else f"{value:.2f}" for value in found.n_alpha)
            logging.info("step %d: tau %.3f, n-alpha %s", step, found.tau, alpha)

    def has_tau(self, step: int) -> bool:
        """Whether the tau of a step was taken down; only the first process knows."""
        return self.leads and any(line["step"] == step for line in read(self.path) if "tau" in line)

    def last(self) -> dict[str, Any]:
        """What the last update saw that was logged."""
        lines = [line for line in read(self.path) if "loss" in line] if self.leads else []
        return {name: lines[-1][name] for name in ("loss", "accuracy", "losses", "gradient")} if lines else {}

    @property
    def speed(self) -> dict[str, float]:
        """Of all updates of this call but the first: tokens per second and the share of the devices' peak."""
        return self._speed(self.seconds / self.updates) if self.updates else {}

    def _speed(self, seconds: float) -> dict[str, float]:
        return {"tokens_s": round(self.tokens / seconds, 1), "mfu": round(self.flops / seconds / self.peak, 4)}

    def figure(self) -> None:
        """Draws the run so far."""
        if self.leads:
            draw(read(self.path), self.args.out / "figure.png", self.args.out.name)

    def close(self) -> None:
        """Ends the bar and the writers."""
        if self.leads:
            self.bar.close()
            self._redirect.__exit__(None, None, None)
            if self._board is not None:
                self._board.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _write(self, record: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
        scalars = dict(flat(record))
        step = int(scalars.pop("step"))
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
            self._board.flush()  # a killed run would lose minutes
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)


def shares(this: Run) -> list[str]:
    """What every source brings: documents, tokens, and its share of what is drawn."""
    documents = {name: this.corpus.of(name) for name in this.corpus.names}
    drawn = this.weights or {name: len(found) for name, found in documents.items()}
    whole = sum(drawn.values())
    return [
        f"{name}: {len(found)} documents, {this.corpus.lengths[found].sum()} tokens, "
        f"{100 * drawn[name] / whole:.1f}% of what is drawn"
        for name, found in documents.items()
    ]


def flat(record: dict[str, Any]) -> list[tuple[str, float]]:
    """Numbers by name; of a list, `name/0`, `name/1`, ..."""
    found = []
    for name, value in record.items():
        values = {f"{name}/{i}": entry for i, entry in enumerate(value)} if isinstance(value, list) else {name: value}
        found += [(key, entry) for key, entry in values.items() if entry is not None]
    return found


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a last one that was cut off by a kill is left out.

    Raises:
      ValueError: it is no such log.
    """
    if not path.is_file():
        return []
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if any("step" not in line for line in lines):
            raise ValueError("a line without a step")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the log of a training run ({error}): move it away") from error
    return lines


def truncate(path: Path, step: int) -> None:
    """Forgets what a killed run logged after its last checkpoint."""
    kept = [line for line in read(path) if line["step"] <= step]
    write_whole(path, "".join(json.dumps(line) + "\n" for line in kept))
