"""Where a training run stands, by Orbax: saved in the background, whole or not at all, restored onto any mesh."""

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

from eagle_jax.checkpoints.files.errors import CheckpointError
from eagle_jax.checkpoints.files.finite import NotFinite
from eagle_jax.core.types import Params

_FULL = tuple(re.escape(os.strerror(number)) for number in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT))


_COMMON: dict[str, Any] = {"create": True, "cleanup_tmp_directories": True}  # what a killed process left half written


class Saved(NamedTuple):
    """A restored checkpoint.

    Attributes:
      step: updates done. state: the tree that was saved. notes: JSON beside it.
    """

    step: int
    state: Any
    notes: dict[str, Any]


class TrainingCheckpoints:
    """The latest checkpoints of a run in `directory/latest`, and the head with the highest tau in `directory/best`.

    Every process of a run makes one and calls it alike; the directory is one that all of them see.

    Args:
      keep: how many of the latest stay.
    """

    def __init__(self, directory: Path, keep: int = 2) -> None:
        directory = directory.absolute()
        self.directory = directory
        self._latest = ocp.CheckpointManager(
            directory / "latest", options=ocp.CheckpointManagerOptions(max_to_keep=keep, **_COMMON)
        )
        highest = ocp.CheckpointManagerOptions(
            max_to_keep=1, best_fn=lambda metrics: metrics["tau"], best_mode="max", **_COMMON
        )
        self._best = ocp.CheckpointManager(directory / "best", options=highest)
        step = self._best.best_step()
        self.best_tau: float | None = None if step is None else float(self._best.metrics(step)["tau"])
        """tau of the best head so far."""

    @property
    def step(self) -> int | None:
        """Updates done at the latest checkpoint, None without one."""
        return self._latest.latest_step()

    def notes(self) -> dict[str, Any] | None:
        """The JSON beside the latest checkpoint, read without its arrays; None without one."""
        return _notes(self._latest, self.step)

    def save(self, step: int, state: Any, notes: dict[str, Any]) -> None:
        """Begins to write; training goes on meanwhile.

        Raises:
          CheckpointError: the state holds values that are not finite, and is not written; or this one, or the one
            before, could not be written, for want of space for example.
        """
        self._save(self._latest, step, state, notes)

    def save_best(self, step: int, head: Params, notes: dict[str, Any], tau: float) -> bool:
        """Keeps the head if its tau is the highest so far; whether it is. When this returns it is on disk.

        Raises:
          CheckpointError: as `save`.
        """
        if self.best_tau is not None and tau <= self.best_tau:
            return False
        self._save(self._best, step, head, notes, {"tau": tau})
        self._written(self._best.wait_until_finished)
        self.best_tau = tau
        return True

    def best_notes(self) -> dict[str, Any] | None:
        """The JSON beside the best head, None without one."""
        return _notes(self._best, self._best.best_step())

    def forget_best(self) -> None:
        """Removes the best head: its tau is not to be compared with what is measured from now on."""
        for step in self._best.all_steps():
            self._best.delete(step)
        self.best_tau = None

    def restore(self, like: Any) -> Saved | None:
        """The latest checkpoint that is whole, None if there is none.

        Args:
          like: arrays or `ShapeDtypeStruct`s with the shardings to restore to.

        Raises:
          CheckpointError: it holds other arrays, or values that are not finite.
        """
        return self._read(self._latest, self.step, like)

    def restore_best(self, like: Any) -> Saved | None:
        """The head with the highest tau, None if none was measured.

        Raises:
          CheckpointError: it holds other arrays, or values that are not finite.
        """
        return self._read(self._best, self._best.best_step(), like)

    def wait(self) -> None:
        """Returns when everything is on disk.

        Raises:
          CheckpointError: something could not be written.
        """
        self._written(self._latest.wait_until_finished)

    def close(self) -> None:
        """Waits, and ends the background threads.

        Raises:
          CheckpointError: something could not be written.
        """
        for manager in (self._latest, self._best):
            self._written(manager.close)

    def _save(self, manager: Any, step: int, state: Any, notes: dict[str, Any], metrics: Any = None) -> None:
        _check_finite(state, f"step {step} is not saved in {self.directory}", "Resume with a lower learning rate.")
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        self._written(lambda: manager.save(step, args=items, metrics=metrics, force=True))

    def _written(self, write: Callable[[], Any]) -> None:
        try:
            write()
        except (OSError, ValueError) as error:  # which of them depends on the thread that meets a full disk
            reason = re.search("|".join(_FULL), str(error), re.IGNORECASE)
            if reason is None:
                raise
            whole = any(path.name.isdigit() for path in (self.directory / "latest").iterdir())
            before = "those before it are whole: make room and resume" if whole else "there is none yet: make room"
            raise CheckpointError(
                f"a checkpoint could not be written to {self.directory} ({reason.group(0).lower()}); {before}"
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
                f"the checkpoint of step {step} in {self.directory} is of another configuration ({reason}); resume "
                "with the one it was begun with, or choose another --out"
            ) from error
        place = manager.directory / str(step)
        _check_finite(found["state"], str(place), "Remove this directory to resume from an earlier checkpoint.")
        return Saved(step, found["state"], found["notes"])


def _check_finite(state: Any, subject: str, remedy: str) -> None:
    """Refuses a state with values that are not finite, naming its arrays."""
    arrays = [
        (jax.tree_util.keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    counts = _count_not_finite(tuple(leaf for _, leaf in arrays))
    spoiled = NotFinite()
    spoiled.found = {name: int(count) for (name, _), count in zip(arrays, counts, strict=True) if count}
    spoiled.raise_if_any(subject, remedy)


@jax.jit
def _count_not_finite(leaves: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.sum(~jnp.isfinite(leaf)) for leaf in leaves)


def _notes(manager: Any, step: int | None) -> dict[str, Any] | None:
    if step is None:
        return None
    return manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore()))["notes"]
