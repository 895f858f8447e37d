"""Checks that the bundled pair loads, and gives the text of plain decoding at full optimisation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eagle_jax

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"


def test_the_target_loads_in_transformers_unchanged():
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, _, tokenizer = eagle_jax.load_demo()
    model, report = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype="float32", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    chat = [{"role": "user", "content": "How many legs do 3 cats have?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    theirs = AutoTokenizer.from_pretrained(DEMO / "target")
    assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert theirs.encode(text, add_special_tokens=False) == ids
    assert tokenizer.decode(ids) == text
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    length = len(ids)
    mask = jnp.tril(jnp.ones((length, length), bool))
    out = target.fn.forward(target.params, jnp.asarray([ids]), jnp.arange(length)[None], mask, None)
    np.testing.assert_allclose(np.asarray(target.fn.logits(target.params, out.hidden[0])), expected, atol=1e-3)


def test_all_drafters_belong_to_the_target():
    drafters = {}
    for name in ("eagle3", "hass", "eagle2", "eagle1", "medusa", "hydra", "small"):
        target, drafters[name], _ = eagle_jax.load_demo(name)
        assert drafters[name].target.fn is target.fn
    assert [drafters[name].config.kind for name in ("eagle3", "hass", "eagle1")] == ["eagle3", "eagle1", "eagle1"]
    leaves = [jax.tree.leaves(drafters[name].params)[0] for name in ("eagle1", "eagle2", "hass")]
    assert (leaves[0] == leaves[1]).all()  # EAGLE-2 changed the tree and not the head
    assert not (leaves[0] == leaves[2]).all()
    medusa, hydra = drafters["medusa"].config, drafters["hydra"].config
    assert (medusa.kind, medusa.num_heads, medusa.prefix) == ("medusa", 5, None)
    assert (hydra.kind, hydra.num_heads) == ("hydra", 4) and hydra.prefix is not None
    assert eagle_jax.load_demo("small", eagle_jax.TreeConfig.chain(2))[1].drafter.depth == 2
    for name, remedy in (("smolm2", "Did you mean 'smollm2'?"), ("llama", "Choose one.")):
        with pytest.raises(ValueError, match=rf"name must be one of eagle1, .*, smollm2, got '{name}'\. {remedy[:-1]}"):
            eagle_jax.load_demo(name)


PROGRAM = """
import eagle_jax
target, _, tokenizer = eagle_jax.load_demo()
chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
prompts = [tokenizer.encode(part, add_special_tokens=False) for part in (text, "<|bos|>import os")]
run = {"max_new_tokens": [90, 70], "eos_ids": ()}
for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "key": 0}):
    plain = eagle_jax.generate(target, None, prompts, **run, **options)
    for name in ("eagle3", "hass", "eagle1", "medusa", "hydra", "small"):
        fast = eagle_jax.generate(target, eagle_jax.load_demo(name)[1], prompts, **run, **options)
        assert fast.tokens == plain.tokens, (name, options)
        assert fast.tau > 1.2, fast.tau
print("identical")
"""


@pytest.mark.slow
def test_text_is_that_of_plain_decoding_at_full_optimisation(repository):
    """Runs in a process of its own, because the other tests lower the compiler's effort."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", PROGRAM]
    run = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("identical")
