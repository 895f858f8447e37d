"""The bundled pair: it loads where it claims to, and its text is that of plain decoding in the program users run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

import eagle_jax

DEMO = Path(eagle_jax.__file__).parent / "assets" / "demo"


@pytest.fixture(scope="module")
def pair():
    return eagle_jax.load_demo()


def test_the_target_loads_in_transformers_unchanged(pair):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target, _, tokenizer = pair
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


def test_all_drafters_belong_to_the_target(pair):
    drafters = {}
    for name in ("eagle3", "hass", "eagle2", "eagle1", "medusa", "hydra", "small"):
        target, drafters[name], _ = eagle_jax.load_demo(name)
        assert drafters[name].target_fn is target.fn is pair[0].fn
    assert [drafters[name].config.kind for name in ("eagle3", "hass", "eagle1")] == ["eagle3", "eagle1", "eagle1"]
    leaves = [jax.tree.leaves(drafters[name].params)[0] for name in ("eagle1", "eagle2", "hass")]
    assert (leaves[0] == leaves[1]).all()  # EAGLE-2 changed the tree and not the head
    assert not (leaves[0] == leaves[2]).all()
    medusa, hydra = drafters["medusa"].config, drafters["hydra"].config
    assert (medusa.kind, medusa.num_heads, medusa.prefix) == ("medusa", 5, None)
    assert (hydra.kind, hydra.num_heads) == ("hydra", 4) and hydra.prefix is not None
    assert drafters["small"].model.config.num_layers == 2
    assert eagle_jax.load_demo("small", eagle_jax.TreeConfig.chain(2))[1].drafter.depth == 2
    with pytest.raises(
        ValueError, match="head must be one of eagle1, eagle2, hass, eagle3, medusa, hydra, small, got 'eagle'"
    ):
        eagle_jax.load_demo("eagle")


def test_the_heads_files_name_what_official_ones_do(golden):
    """As the reference engine's own tiny heads do; its EAGLE-2 head has a bias in `fc` besides, which is optional."""
    names = {}
    for folder in (DEMO, golden):
        for head in ("eagle1", "eagle3"):
            with safetensors.safe_open(folder / head / "model.safetensors", framework="np") as stored:
                names[folder, head] = set(stored.keys())
    assert names[DEMO, "eagle3"] == names[golden, "eagle3"]
    assert names[golden, "eagle1"] - names[DEMO, "eagle1"] == {"fc.bias"}
    assert names[DEMO, "eagle1"] < names[golden, "eagle1"]


def test_the_files_are_small():
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) < 48e6


PROGRAM = """
import eagle_jax
target, _, tokenizer = eagle_jax.load_demo()
chat = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
prompts = [tokenizer.encode(part, add_special_tokens=False) for part in (text, "<|bos|>import os")]
run = {"max_new_tokens": [90, 70], "eos_ids": ()}
for options in ({"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "key": 0}):
    plain = eagle_jax.generate(target, None, prompts, **run, **options)
    for name in NAMES:
        fast = eagle_jax.generate(target, eagle_jax.load_demo(name)[1], prompts, **run, **options)
        assert fast.tokens == plain.tokens, (name, options)
        assert fast.tau > 1.2, fast.tau
print("identical")
"""


@pytest.mark.parametrize(
    "names",
    [("eagle3",), pytest.param(("hass", "eagle1", "medusa", "hydra", "small"), marks=pytest.mark.slow)],
    ids=str,
)
def test_text_is_that_of_plain_decoding_at_full_optimisation(repository, names):
    """The other tests lower the compiler's effort; this one runs what users run, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("NAMES", repr(names))],
        capture_output=True,
        text=True,
        cwd=repository,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().endswith("identical")


def test_the_model_cards_taus_are_those_measured(repository):
    card = (repository / "eagle_jax" / "assets" / "README.md").read_text(encoding="utf-8")
    names = ("eagle1", "hass", "eagle3", "hydra", "medusa", "small")
    found = {}
    for name in names:
        report = json.loads((repository / "docs" / "measured" / f"evaluate_{name}.json").read_text(encoding="utf-8"))
        for entry in report["results"]:
            found[f"{entry['temperature']:g}", entry["prompts"], name] = f"{entry['tau']:.2f}"
            assert entry["identical"] == "16/16"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    shown = {(row[0], row[1], name): value for row in rows if row[1:] and row[1] in ("completion", "gsm8k", "instruct")
             for name, value in zip(names, row[2:], strict=True)}  # fmt: skip
    assert shown == found
