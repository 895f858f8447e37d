"""Checks the optimisers of heads."""

from __future__ import annotations

import functools
import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train.head
import train.loop.run
from eagle_jax.training import head_optimiser
from tests.training.common import args_of, losses

RATE = 0.01


def test_muon_updates_matrices_of_layers_orthogonally_and_the_rest_as_adam():
    rng = np.random.default_rng(0)
    matrix, scale = jnp.asarray(rng.normal(size=(6, 4))), jnp.asarray(rng.normal(size=4))
    grads = {"o_proj": {"weight": matrix}, "norm": {"scale": scale}}
    grads |= {name: {"weight": matrix} for name in ("lm_head", "heads_0_lm_head")}
    params = jax.tree.map(jnp.zeros_like, grads)

    def second_update(tx):  # the rate rises from 0
        _, state = tx.update(grads, tx.init(params), params)
        return tx.update(grads, state, params)[0]

    found = second_update(head_optimiser(RATE, 1, 10, 1e9, "muon"))
    adam = second_update(optax.nadam(optax.warmup_cosine_decay_schedule(0, RATE, 1, 10, RATE / 100), b2=0.95))
    for name in ("norm", "lm_head", "heads_0_lm_head"):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found[name], adam[name])
    update = np.asarray(found["o_proj"]["weight"])
    singular = np.linalg.svd(update)[1]
    assert singular.max() / singular.min() < 1.7 < np.linalg.cond(matrix)  # Newton-Schulz: 0.7 to 1.2
    assert 0.5 < np.sqrt(np.mean(update**2)) / (0.2 * RATE) < 1.3
    assert np.vdot(update, matrix) < 0


@pytest.mark.slow
def test_a_run_with_muon_continues_on_another_mesh(place, tmp_path, monkeypatch):
    options = dict(optimiser="muon", rate=1e-2)
    assert train.head.main(args_of(place, tmp_path / "whole", data_axis=1, **options)) == 0
    advance = train.loop.run.Run.advance

    def stopped_in_third(this):
        if this.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return advance(this)

    with monkeypatch.context() as patch:
        patch.setattr(train.loop.run.Run, "advance", stopped_in_third)
        assert train.head.main(args_of(place, tmp_path / "parts", data_axis=1, **options)) == 128 + signal.SIGTERM
    assert train.head.main(args_of(place, tmp_path / "parts", fsdp=2, tensor=2, **options)) == 0
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert whole[-1][0] < whole[0][0]
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)
