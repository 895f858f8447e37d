"""Checks the programs of train/ from raw data to a saved pair that drafts, on a tiny model."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import safetensors

import eagle_jax
import train.demo.data
import train.evaluate
import train.features
import train.head
import train.regenerate
import train.target
from eagle_jax import load_tokenizer
from eagle_jax.checkpoints import save_head_checkpoint, save_target_checkpoint
from eagle_jax.config import TreeConfig
from eagle_jax.data.corpus.features import Layout
from eagle_jax.data.corpus.sources import Source
from tests.data.chats import TEMPLATES, tokenizer_with
from tests.models import tiny_head, tiny_target
from tests.training.common import check_lossless, report_of

FUNCTION = 'def double_0(x):\n    """Twice x."""\n    y = 2 * x\n    return y\n\n\n'


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Returns a folder of a few raw rows and the output of `train.demo.data` for them."""
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
        patch.setattr(train.demo.data, "standard_library", lambda: iter([library]))
        train.demo.data.main(train.demo.data.Args(data=root / "raw", out=root / "data", vocab_size=300))
    return root


def test_data_holds_out_two_percent_of_every_source(prepared):
    for name in train.demo.data.SOURCES:
        folders = (prepared / "data", prepared / "data" / "heldout")
        kept, held = ({json.dumps(row) for row in Source(str(at / f"{name}.jsonl")).rows()} for at in folders)
        assert 0 < len(held) < len(kept) / 10 and not kept & held
    assert not list((prepared / "data").rglob(".eagle_jax-tmp-*"))


@pytest.mark.slow
def test_packed_rows_join_documents_at_the_shares_of_their_sources(prepared):
    tokenizer = load_tokenizer(prepared / "data" / "tokenizer", tiny_target(300).config)
    corpus = train.target.read(prepared / "data", tokenizer)
    shares = list(train.target.SHARES.values())
    rows = train.target.packed_rows(corpus, shares, 33, 1, pool=1000)
    first = train.target.take(rows, 1000)
    assert first.shape == (1000, 33)
    order = np.random.default_rng((1, 0, 0)).permutation(1000)
    text = first[np.argsort(order)].reshape(-1)
    starts = np.flatnonzero(text == 0)  # <|bos|> begins a document, and follows the end of another
    assert starts[0] == 0 and (text[starts[1:] - 1] == 1).all()
    known = {tuple(corpus[i].tokens.tolist()): i for i in range(len(corpus))}
    pieces = [known[tuple(piece.tolist())] for piece in np.split(text, starts[1:])[:-1]]  # the last is cut by the pool
    seen = np.bincount(pieces, minlength=len(corpus))
    spent = np.bincount(corpus.source, seen * corpus.lengths)
    for name in corpus.names:  # a document repeats after all others of its source
        assert np.ptp(seen[corpus.of(name)]) <= 1
    np.testing.assert_allclose(spent / spent.sum(), shares, atol=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "weights"), [("eagle3", None), ("eagle1", "int8"), ("eagle3", "int4")])
def test_the_programs_make_a_pair_from_raw_data(prepared, method, weights, tmp_path, capsys):
    args = train.target.Args(
        data=prepared / "data", out=tmp_path / "run", layers=6, hidden=32, intermediate=48, heads=2, kv_heads=1,
        head_dim=16, length=32, micro_rows=4, micro_batches=2, steps=4, held_rows=4, warmup=2,
    )  # fmt: skip
    train.target.main(args)
    train.target.main(dataclasses.replace(args, steps=8))
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["tokens"]) for entry in history] == [(4, 4 * 8 * 32), (8, 8 * 8 * 32)]
    target, data = tmp_path / "run" / "checkpoint", prepared / "data"
    train.regenerate.main(
        train.regenerate.Args(
            target=str(target), data=(str(data / "gsm8k.jsonl"), str(data / "instruct.jsonl")), limit=8, batch=4,
            max_new_tokens=8, max_prompt=64, out=tmp_path / "replies", weights=weights,
        )
    )  # fmt: skip
    train.head.main(
        train.head.Args(
            target=str(target), data=(str(tmp_path / "replies" / "*.jsonl"),), out=tmp_path / "head", method=method,
            draft_vocab=64, steps=2, rows=4, length=32, unroll=2 if method == "eagle3" else None, warmup=1,
            dtype="float32", heldout=(str(data / "heldout" / "gsm8k.jsonl"),), eval_prompts=4, eval_tokens=8,
            eval_tree="2,2,4", weights=weights,
        )
    )  # fmt: skip
    assert "loss" in report_of(capsys)
    head = tmp_path / "head" / "head"
    with safetensors.safe_open(head / "model.safetensors", framework="np") as stored:
        assert ("embed_tokens.weight" in stored.keys()) == (method == "eagle1")  # noqa: SIM118
    loaded = eagle_jax.load_target(target, weights=weights)
    check_lossless(loaded, eagle_jax.load_drafter(head, loaded, tree=TreeConfig.chain(2)))


@pytest.mark.slow
def test_evaluate_reports_tau_of_every_source(tmp_path, capsys):
    target, head = tiny_target(272), tiny_head("eagle1", TreeConfig.chain(2), 272)
    save_target_checkpoint(target.config, target.params, tmp_path / "target", "float32")
    tokenizer = tokenizer_with(TEMPLATES["chatml"])
    tokenizer.save_pretrained(tmp_path / "target")
    save_head_checkpoint(head.config, head.params, tmp_path / "head", "float32")
    turns = lambda text: [{"role": "user", "content": text}, {"role": "assistant", "content": "Ho."}]  # noqa: E731
    rows = [{"text": "plain"}, {"messages": turns("x" * 200)}, *({"messages": turns(f"{i}")} for i in range(5))]
    for name, some in (("a", rows), ("b", rows[3:6]), ("c", rows[:2])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    train.evaluate.main(
        train.evaluate.Args(
            target=str(tmp_path / "target"), head=str(tmp_path / "head"), heldout=(str(tmp_path / "*.jsonl"),),
            prompts=3, max_new_tokens=9, tree="2,2,4", temperatures=(0.0,), weights="int4",
        )
    )  # fmt: skip
    report = report_of(capsys)
    found = report["results"]
    assert report["weights"] == "int4"
    assert [(entry["prompts"], entry["replies"]) for entry in found] == [("a", 3), ("b", 3)]
    prompts = [eagle_jax.chat_ids(tokenizer, turns(f"{i}")[:1]) for i in range(3)]
    target = eagle_jax.load_target(tmp_path / "target", weights="int4")
    out = eagle_jax.generate(target, head.with_tree(TreeConfig(2, 2, 4)), prompts, max_new_tokens=9)
    wanted = {"tau": round(out.tau, 3), "tokens": 27, "cycles": int(out.cycles.sum()), "identical": "3/3"}
    assert found[0] | wanted == found[0] and len(found[0]["n_alpha"]) == 6


def test_features_raise_if_the_disk_is_too_small(tmp_path, monkeypatch):
    layout = Layout("", "", "", "", "", (1, 1, 1), 64, "bfloat16", 64, (0, 1))
    usage = train.features.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(train.features.shutil, "disk_usage", lambda _: usage._replace(free=0))
    (tmp_path / ".eagle_jax-tmp-features-00000.npy").touch()
    with pytest.raises(ValueError, match=r"must have 0.00 GB free, got 0.00 GB in .*. Choose --stored float8"):
        train.features.check_space(layout, 10, tmp_path)
    assert not list(tmp_path.iterdir())  # it removed the partial shard of a killed run
