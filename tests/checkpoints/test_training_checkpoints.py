"""Tests checkpoints of a run: whole or not at all, the best by tau, full disks, other meshes."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eagle_jax.checkpoints import CheckpointError
from eagle_jax.checkpoints.training import TrainingCheckpoints
from eagle_jax.parallel import make_mesh, param_shardings


class State(NamedTuple):
    head: dict
    opt_state: tuple
    key: jax.Array


def state(size: int = 8, seed: int = 0) -> State:
    head = {"norm": {"scale": jnp.ones(4)}, "fc": {"weight": jax.random.normal(jax.random.key(seed), (size, 4))}}
    return State(head, optax.adamw(1e-3).init(head), jax.random.key(3))


def numbers(tree) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            for x in jax.tree.leaves(tree)]  # fmt: skip


@pytest.fixture
def checkpoints(tmp_path):
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as opened:
        yield opened


def test_a_saved_state_is_restored_on_another_mesh(checkpoints, tmp_path):
    mesh = make_mesh(1, 2, 2)
    wide = jax.device_put(state(), param_shardings(state(), mesh))
    assert wide.opt_state[0].mu["fc"]["weight"].sharding == NamedSharding(mesh, P("fsdp", "tensor"))
    assert checkpoints.step is None and checkpoints.notes() is None and checkpoints.restore(state()) is None
    for step in (1, 2, 3):
        checkpoints.save(step, wide, {"at": [step, {"x": None}]})
    checkpoints.wait()
    assert sorted(path.name for path in (tmp_path / "latest").iterdir()) == ["2", "3"]
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as again:
        found = again.restore(state(seed=1))
        assert (found.step, found.notes) == (3, {"at": [3, {"x": None}]})
        assert again.notes() == found.notes
    for got, want in zip(numbers(found.state), numbers(state()), strict=True):
        np.testing.assert_array_equal(got, want)


def test_the_best_head_stays_until_a_better_one_or_forget_best(checkpoints, tmp_path):
    taus = (1.5, 2.5, 2.0, 2.5)
    kept = [checkpoints.save_best(step, state(seed=step).head, {"at": step}, tau) for step, tau in enumerate(taus)]
    assert kept == [True, True, False, False]
    assert (tmp_path / "best" / "1").is_dir(), "a kill now would keep a later step and lose its head"
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as again:
        assert (again.best_tau, again.best_notes()) == (2.5, {"at": 1})
        found = again.restore_best(state().head)
        assert found.step == 1
        np.testing.assert_array_equal(found.state["fc"]["weight"], state(seed=1).head["fc"]["weight"])
        assert not again.save_best(9, state().head, {}, 2.5)
        again.forget_best()
        assert again.best_tau is None and again.best_notes() is None
        assert again.save_best(10, state().head, {}, 1.2)


def test_a_state_of_another_configuration_is_an_error(checkpoints):
    checkpoints.save(4, state(), {})
    with pytest.raises(CheckpointError, match=r"the checkpoint of step 4 in .* must hold the arrays of this run"):
        checkpoints.restore(state(12))


def test_a_full_disk_is_an_error_and_keeps_the_previous_checkpoint(tmp_path):
    """A limit on the size of files stands for the disk."""
    opened = TrainingCheckpoints(tmp_path)
    opened.save(1, state(), {})
    opened.wait()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        opened.save(2, state(5000), {})  # in the background
        with pytest.raises(CheckpointError, match=r"could not be written to .* \(file too large\)\. Free disk"):
            opened.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as again:
        found = again.restore(state(seed=1))
        assert found.step == 1
        np.testing.assert_array_equal(found.state.head["fc"]["weight"], state().head["fc"]["weight"])


def test_an_incomplete_checkpoint_is_ignored_and_removed(checkpoints, tmp_path):
    """`kill -9` leaves a directory under a temporary name."""
    checkpoints.save(1, state(), {"x": 1})
    checkpoints.wait()
    torn = tmp_path / "latest" / "3.orbax-checkpoint-tmp"
    (torn / "state").mkdir(parents=True)
    (torn / "notes.json").write_text(json.dumps({}))
    with contextlib.closing(TrainingCheckpoints(tmp_path)) as again:
        assert again.step == 1
        again.save(2, state(), {"x": 2})  # waits for the removal of the incomplete one, which began on opening
        again.wait()
        assert not torn.exists(), "it would lie there for ever"
        assert again.notes() == {"x": 2}
