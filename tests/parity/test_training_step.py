"""Checks loss and gradients of an EAGLE-3 step against PyTorch from the formula (`torch_step.py`).

Both compute the loss as published (arXiv:2503.01840, section 3). The public trainers (EAGLE's `traineagle3`, SpecForge)
choose otherwise in four places, and neither of the two sides here does:

- Their mask is that of the row's own token p (step k: p+k), while the guess is of token p+2+k. Here the mask is shifted
  together with the label.
- They divide by all positions of the batch, masked ones included; here by those that count.
- Past the end they pad the labels with uniform distributions and rely on the mask; here such rows do not count.
- They pad every text into a row of its own; here a row may hold several documents, which neither see nor teach each
  other.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

from eagle_jax.config import DecoderConfig, HeadConfig, RopeConfig  # noqa: E402
from eagle_jax.models import init_head_params, init_params  # noqa: E402
from eagle_jax.packed import PackedTokens  # noqa: E402
from eagle_jax.training import Frozen, Objective, head_loss  # noqa: E402
from tests.parity import torch_step  # noqa: E402

TOLERANCE = 1e-5
V, T, STEPS = 29, 13, 4
# head_dim is not H / A, three query heads share a key, the head's MLP is narrower than the target's.
TARGET = DecoderConfig(V, 20, 24, 4, num_heads=6, num_kv_heads=2, head_dim=6, rope=RopeConfig(theta=50.0))
LAYER = dataclasses.replace(TARGET, num_layers=1, intermediate_size=14, rms_norm_eps=1e-3)
KEPT = np.array([0, 1, 4, 5, 7, 9, 10, 12, 13, 15, 18, 19, 21, 24, 25, 28], np.int32)
HEAD = HeadConfig("eagle3", LAYER, len(KEPT), 20, (1, 2, 4))
OBJECTIVE = Objective(steps=STEPS, chunk=5)
OURS = jax.jit(jax.value_and_grad(functools.partial(head_loss, TARGET, HEAD, OBJECTIVE), has_aux=True))


def filled(shapes, seed):
    """Random weights, large enough for every part to matter (NumPy: nothing to compile)."""
    rng = np.random.default_rng(seed)
    draw = lambda path, leaf: rng.normal(size=leaf.shape) * 0.3 + (path[-1].key == "scale")  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda *leaf: jnp.asarray(draw(*leaf), jnp.float32), shapes)


def texts_of(documents):
    """One row per tuple of document lengths; what they leave of T is padding. Two thirds of the tokens are to learn."""
    rng = np.random.default_rng(7)
    segments, positions = np.zeros((2, len(documents), T), np.int32)
    for row, lengths in enumerate(documents):
        ends = np.cumsum(lengths)
        for index, (size, end) in enumerate(zip(lengths, ends, strict=True), 1):
            segments[row, end - size : end] = index
            positions[row, end - size : end] = np.arange(size)
    supervised = (rng.random(segments.shape) < 0.67) & (segments > 0)
    tokens = rng.integers(0, V, segments.shape, np.int32)
    return PackedTokens(*map(jnp.asarray, (tokens, supervised, segments, positions)))


@pytest.mark.parametrize("documents", [[(6, 7), (9,)], [(T,), (T,)]], ids=["packed", "whole"])
def test_loss_and_gradients_are_those_of_pytorch(documents):
    key, texts = jax.random.key(0), texts_of(documents)
    target = filled(jax.eval_shape(lambda: init_params(TARGET, key)), 1)
    head = filled(jax.eval_shape(lambda: init_head_params(HEAD, key))["head"], 2)
    frozen = Frozen(target, jnp.asarray(KEPT - np.arange(len(KEPT), dtype=np.int32)))
    (loss, metrics), grads = OURS(head, frozen, texts, key)

    theirs = {name: value.requires_grad_() for name, value in torch_step.tensors(head).items()}
    arguments = theirs, torch_step.tensors(target), torch.from_numpy(KEPT).long(), texts
    wanted, accuracies = torch_step.head_loss(TARGET, HEAD, STEPS, OBJECTIVE.decay, *arguments)
    wanted.backward()
    assert float(loss) == pytest.approx(float(wanted.detach()), rel=TOLERANCE)
    np.testing.assert_allclose(metrics.accuracy, accuracies, atol=1e-6)
    got = torch_step.tensors(grads)
    assert got.keys() == theirs.keys()
    for name, value in theirs.items():
        scale = float(value.grad.abs().max())
        assert scale > 1e-4, f"{name} gets no gradient: the comparison would be empty"
        assert float((got[name] - value.grad).abs().max()) <= TOLERANCE * scale, name
