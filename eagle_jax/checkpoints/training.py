"""Saves training runs with Orbax in the background, and restores them onto any mesh."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from eagle_jax.checkpoints.files.fields import CheckpointError
from eagle_jax.checkpoints.files.mapping import flatten
from eagle_jax.checkpoints.files.weights import raise_not_finite
from eagle_jax.core.types import Params

_FULL = "|".join(re.escape(os.strerror(number)) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT))
# `cleanup_tmp_directories` removes partial writes of killed processes.
_COMMON: dict[str, Any] = {"create": True, "cleanup_tmp_directories": True}


class Saved(NamedTuple):
    """A restored checkpoint.

    Attributes:
      step: updates done. state: the saved tree of arrays. notes: the JSON saved with it.
    """

    step: int
    state: Any
    notes: dict[str, Any]


class TrainingCheckpoints:
    """Latest checkpoints of a run in `directory/latest`, and the head with the highest tau in `best`.

    Every process creates one, with the same calls and a shared directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        latest = ocp.CheckpointManagerOptions(max_to_keep=2, **_COMMON)
        best = ocp.CheckpointManagerOptions(
            max_to_keep=1, best_fn=lambda metrics: metrics["tau"], best_mode="max", **_COMMON
        )
        self._latest = ocp.CheckpointManager(self.directory / "latest", options=latest)
        self._best = ocp.CheckpointManager(self.directory / "best", options=best)
        step = self._best.best_step()
        self.best_tau: float | None = None if step is None else float(self._best.metrics(step)["tau"])
        """tau of the best head so far."""

    @property
    def step(self) -> int | None:
        """Updates done at the latest checkpoint; None without one."""
        return self._latest.latest_step()

    def notes(self) -> dict[str, Any] | None:
        """Returns the JSON of the latest checkpoint; None without a checkpoint. Reads no arrays."""
        return _notes(self._latest, self.step)

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Starts an asynchronous save.

        Raises:
          CheckpointError: the state is not finite, or this or the previous one could not be written (a full disk).
        """
        self._save(self._latest, step, state, notes)

    def save_best(self, step: int, head: Params, notes: dict[str, Any], tau: float) -> bool:
        """Writes the head to disk if its tau is the highest so far; returns whether it is.

        Raises:
          CheckpointError: as `save`.
        """
        if self.best_tau is not None and tau <= self.best_tau:
            return False
        self._save(self._best, step, head, notes, {"tau": tau})
        self._run_write(self._best.wait_until_finished)
        self.best_tau = tau
        return True

    def best_notes(self) -> dict[str, Any] | None:
        """Returns the JSON of the best head; None without a best head."""
        return _notes(self._best, self._best.best_step())

    def forget_best(self) -> None:
        """Removes the best head, whose tau is not comparable with later ones."""
        for step in self._best.all_steps():
            self._best.delete(step)
        self.best_tau = None

    def restore(self, like: Any) -> Saved | None:
        """Returns the latest checkpoint that is whole; None without one.

        Args:
          like: arrays or `ShapeDtypeStruct`s with the shardings to restore to.

        Raises:
          CheckpointError: the checkpoint holds other arrays, or values that are not finite.
        """
        return self._read(self._latest, self.step, like)

    def restore_best(self, like: Any) -> Saved | None:
        """Returns the head with the highest tau, as `restore`."""
        return self._read(self._best, self._best.best_step(), like)

    def wait(self) -> None:
        """Waits until everything is on disk; raises `CheckpointError` if something could not be written."""
        self._run_write(self._latest.wait_until_finished)

    def close(self) -> None:
        """Waits as `wait`, and ends the background threads."""
        for manager in (self._latest, self._best):
            self._run_write(manager.close)

    def _save(self, manager: Any, step: int, state: Any, notes: dict[str, Any], metrics: Any = None) -> None:
        _check_finite(state, f"step {step} is not saved in {self.directory}", "Resume with a lower learning rate.")
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        self._run_write(lambda: manager.save(step, args=items, metrics=metrics, force=True))

    def _run_write(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:  # which of them depends on the thread that meets a full disk
            reason = re.search(_FULL, str(error), re.IGNORECASE)
            if reason is None:
                raise
            raise CheckpointError(
                f"a checkpoint could not be written to {self.directory} ({reason.group(0).lower()}). Free disk "
                "space and resume."
            ) from error

    def _read(self, manager: Any, step: int | None, like: Any) -> Saved | None:
        if step is None:
            return None
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), notes=ocp.args.JsonRestore())
        try:
            found = manager.restore(step, args=items)
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(
                f"the checkpoint of step {step} in {self.directory} must hold the arrays of this run, got others "
                f"({reason}). Resume with the run's original configuration, or choose another directory."
            ) from error
        place = manager.directory / str(step)
        _check_finite(found["state"], str(place), "Remove this directory to resume from an earlier checkpoint.")
        return Saved(step, found["state"], found["notes"])


def _check_finite(state: Any, subject: str, remedy: str) -> None:
    """Raises an error that names the arrays of a state with values that are not finite."""
    arrays = {path: leaf for path, leaf in flatten(state).items() if jnp.issubdtype(leaf.dtype, jnp.floating)}
    raise_not_finite({path: int(count) for path, count in _count_not_finite(arrays).items()}, subject, remedy)


@jax.jit
def _count_not_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {path: jnp.sum(~jnp.isfinite(array)) for path, array in arrays.items()}


def _notes(manager: Any, step: int | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
