"""The programs of train/ from raw data to a saved pair that drafts, on a tiny model."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from transformers import AutoTokenizer

import eagle_jax
import train.data
import train.evaluate
import train.head
import train.regenerate
import train.target
from eagle_jax.programs import arguments
from eagle_jax.data.corpus import SOURCES, Corpus
from tests import oracles
from tests.models import tiny_target

FUNCTION = 'def double_0(x):\n    """Twice x."""\n    y = 2 * x\n    return y\n\n\n'


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A data folder of a few rows and what `train.data` makes of it."""
    root = tmp_path_factory.mktemp("train")
    (root / "raw" / "gsm8k").mkdir(parents=True)
    (root / "raw" / "gpteacher").mkdir()
    lines = [{"question": f"What is {i} + {i}?", "answer": f"<<{i}+{i}={2 * i}>>\n#### {2 * i}"} for i in range(300)]
    (root / "raw" / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    turns = [{"instruction": f"Say {i}.", "input": "" if i % 2 else "Loudly.", "response": f"{i}!"} for i in range(300)]
    turns += [{"instruction": "Long", "input": "", "response": "x" * 5000}, {"instruction": "", "response": "no"}]
    (root / "raw" / "gpteacher" / "turns.json").write_text(json.dumps(turns))
    with pytest.MonkeyPatch.context() as patch:
        library = "".join(FUNCTION.replace("_0", f"_{i}") for i in range(2000))
        patch.setattr(train.data, "standard_library", lambda: iter([(root / "a.py", library)]))
        train.data.main(train.data.Args(data=root / "raw", out=root / "data", vocab_size=300))
    return root


def test_documents_are_what_the_chat_template_renders(prepared):
    tokenizer = AutoTokenizer.from_pretrained(prepared / "data" / "tokenizer")
    corpus, held = (Corpus.load(prepared / "data" / f"{name}.npz") for name in ("train", "heldout"))
    assert len(held.lengths) > 0
    row = int(np.flatnonzero(corpus.source == SOURCES.index("gsm8k"))[0])
    ids = corpus.document(row)
    question, answer = tokenizer.decode(ids).split("<|user|>")[1].removesuffix("<|end|>").split("<|assistant|>")
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    rendered = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    assert rendered["input_ids"] == ids.tolist()
    assert rendered["assistant_masks"].index(1) == corpus.prompts[row]
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert prompt == ids[: corpus.prompts[row]].tolist()
    completion = int(np.flatnonzero(corpus.source == SOURCES.index("completion"))[0])
    text = tokenizer.decode(corpus.document(completion))
    turn = FUNCTION.replace('x."""\n', 'x."""\n<|assistant|>').rstrip()
    assert text == f"<|bos|><|user|>{train.data.COMPLETE}{turn}<|end|>"


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle3", "eagle2"])
def test_from_raw_data_to_a_pair_that_drafts(prepared, head, tmp_path):
    args = train.target.Args(
        data=prepared / "data", out=tmp_path / "run", layers=6, hidden=32, intermediate=48, heads=2, kv_heads=1,
        head_dim=16, length=32, micro_rows=4, micro_batches=2, steps=4, held_rows=4, warmup=2,
    )  # fmt: skip
    train.target.main(args)
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert history[-1]["step"] == 4
    target = tmp_path / "run" / "checkpoint"
    train.regenerate.main(
        train.regenerate.Args(
            target, prepared / "data" / "train.npz", tmp_path / "replies.npz", documents=8, batch=4, max_new_tokens=8
        )
    )
    train.head.main(
        train.head.Args(
            target, (tmp_path / "replies.npz",), tmp_path / "head", prepared / "data" / "heldout.npz", head=head,
            draft_vocab=64, updates=2, rows=2, length=32, steps=2, warmup=1,
        )
    )  # fmt: skip
    loaded = eagle_jax.load_target(target)
    drafter = eagle_jax.load_drafter(tmp_path / "head", loaded, tree=eagle_jax.TreeConfig.chain(2))
    with safetensors.safe_open(tmp_path / "head" / "model.safetensors", framework="np") as stored:
        assert ("embed_tokens.weight" in stored.keys()) == (head == "eagle2")  # noqa: SIM118
    args = train.regenerate.Args(
        target, prepared / "data" / "train.npz", tmp_path / "drafted.npz", head=tmp_path / "head", tree="2,2,4",
        documents=8, batch=4, max_new_tokens=8,
    )  # fmt: skip
    train.regenerate.main(args)
    replies = [Corpus.load(tmp_path / f"{name}.npz") for name in ("replies", "drafted")]
    assert replies[0].tokens.tolist() == replies[1].tokens.tolist()
    prompts = [[0, 2, 40, 41, 3]]
    drafted = eagle_jax.generate(loaded, drafter, prompts, max_new_tokens=8)
    assert drafted.tokens == eagle_jax.generate(loaded, None, prompts, max_new_tokens=8).tokens


def test_mass_is_the_share_of_the_likeliest_tokens():
    """By one softmax per position, over what the target wrote and nothing else."""
    target = tiny_target()
    prompts, replies, temperature = [[1, 2], [3, 4, 5, 6]], [[7, 8, 9], [10]], 0.7
    rows = []
    for prompt, reply in zip(prompts, replies, strict=True):
        text = jnp.asarray([prompt + reply])
        length = text.shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))
        out = target.fn.forward(target.params, text, jnp.arange(length)[None], causal, None)
        logits = np.asarray(target.fn.logits(target.params, out.hidden[0]))
        rows += [oracles.processed_law(logits[i], temperature) for i in range(len(prompt) - 1, length - 1)]
    best = np.sort(np.array(rows), axis=-1)[:, ::-1][:, :3]
    wanted = best.cumsum(axis=-1).mean(axis=0)
    found = train.evaluate.mass(target, prompts, replies, temperature, best=3)
    assert found == pytest.approx(wanted.tolist(), abs=2e-4)


@pytest.mark.parametrize(
    ("program", "options", "message"),
    [
        ("data", dict(data="nowhere"), "lacks nowhere/gsm8k/train.jsonl and nowhere/gpteacher"),
        ("target", dict(data="nowhere"), "no tokenizer in nowhere: run `python -m train.data"),
        ("regenerate", dict(target="t", corpus="nowhere.npz", out="o"), "no corpus at nowhere.npz: `python -m train"),
        ("regenerate", dict(target="t", corpus="text.npz", out="o"), "text.npz is not a corpus"),
        ("head", dict(target="t", corpus=("nowhere.npz",), out="o"), "no corpus at nowhere.npz"),
        ("head", dict(target="t", corpus=("c",), out="o", updates=0), "--updates 0 must be at least 1"),
        ("evaluate", dict(target="t", head="h", heldout="nowhere.npz"), "no corpus at nowhere.npz"),
        ("target", dict(data="d", held_rows=6), "--held-rows 6 must be a multiple of 4"),
    ],
)
def test_a_missing_earlier_step_is_named(program, options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.npz").write_text("no archive")
    module = importlib.import_module(f"train.{program}")
    paths = ("data", "target", "corpus", "out", "head", "heldout")
    as_path = lambda value: tuple(map(Path, value)) if isinstance(value, tuple) else Path(value)  # noqa: E731
    arguments = {name: as_path(value) if name in paths else value for name, value in options.items()}
    with pytest.raises(ValueError, match=re.escape(message)):
        module.main(module.Args(**arguments))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.npz"]


@pytest.mark.parametrize("name", ["target", "eagle3", "eagle3_ttt", "eagle2"])
def test_the_bundled_pairs_configurations_load(repository, name):
    program = train.target if name == "target" else train.head
    args = arguments(program.Args, "", ["--config", str(repository / "configs" / f"demo_{name}.yaml")])
    assert name.removesuffix("_ttt") in str(args.out)
    assert (args.init is not None) == (name == "eagle3_ttt") if name != "target" else args.layers == 16
