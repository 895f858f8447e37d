"""Checks configurations: bad values, YAML files as dataclasses, and the files of `configs/`."""

from __future__ import annotations

import collections
import dataclasses
import importlib
import re
import shlex
from pathlib import Path
from typing import Literal

import hypothesis.strategies as st
import pytest
from hypothesis import given

from eagle_jax.config import (
    ConfigError,
    DecoderConfig,
    HeadConfig,
    MedusaConfig,
    RopeConfig,
    TreeConfig,
    sibling_ranks,
    static_depths,
)
from eagle_jax.data.corpus.sources import Source
from eagle_jax.settings import load_yaml
from infer.common.programs import arguments
from train.loop.options import RunArgs

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))
assert CONFIGS
DECODER = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)


HEAD = HeadConfig("eagle3", DECODER, draft_vocab_size=64, target_hidden_size=32, taps=(1, 2, 3))


@given(st.integers(1, 8), st.integers(1, 10))
def test_num_nodes_is_bounded_by_the_candidates(depth, top_k):
    pool = top_k + (depth - 1) * top_k**2
    assert TreeConfig(depth=depth, top_k=top_k, num_nodes=pool).pool_size == pool
    with pytest.raises(ConfigError, match=rf"num_nodes must be at most {pool}, .* got {pool + 1}"):
        TreeConfig(depth=depth, top_k=top_k, num_nodes=pool + 1)


@given(st.data())
def test_a_static_tree_follows_from_its_parents(data):
    count = data.draw(st.integers(1, 20))
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(count)]
    tree = TreeConfig.static(parents)
    children = collections.Counter(parents)
    assert (tree.num_nodes, tree.top_k) == (count, max(children.values()))
    depths, ranks = static_depths(parents), sibling_ranks(parents)
    assert tree.depth == max(depths)
    for node, parent in enumerate(parents):
        assert depths[node] == (1 if parent == -1 else depths[parent] + 1)
        assert ranks[node] == parents[:node].count(parent)
    assert dataclasses.replace(tree, sampled_ranking="law").parents == tuple(parents)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda name=name, value=value: TreeConfig(**{name: value}),
           rf"TreeConfig\.{name} must be an integer of at least 1, got ")
          for name, value in zip(("depth", "top_k", "num_nodes") * 2, (0, -1, 2.0, "8", True, None), strict=True)),
        (lambda: TreeConfig(3, 4, 13, rerank=False), "num_nodes must be at most 12, .* without rerank"),
        (lambda: TreeConfig(6, 10, 5), "num_nodes must be at least depth=6, got 5"),
        (lambda: TreeConfig(rank_by="probability"), "rank_by must be one of 'value', 'confidence', got 'probability'"),
        (lambda: TreeConfig(noise_scale=0), r"noise_scale must lie in \(0.01, 100\], got 0"),
        *((lambda value=value: TreeConfig(top_p=value), rf"top_p must lie in \(0, 1\], got {value}")
          for value in (0.0, 1.5, float("nan"))),
        (lambda: TreeConfig.chain(3, "typical"), "verification must be one of 'deterministic', .* got 'typical'"),
        (lambda: TreeConfig(verification="rejection"), "must be 'deterministic' for a dynamic tree, got 'rejection'"),
        (lambda: TreeConfig.static([-1, -1, 0], "block"), "must not be 'block' for a tree. Use 'traversal'"),
        (lambda: TreeConfig.static([-1, 0], "rejection", top_p=0.5), "top_p must be 1 for verification='rejection'"),
        (lambda: TreeConfig(depth=4, parents=(-1, 0)), "depth must be 2 for these parents, got 4. Leave it out"),
        (lambda: TreeConfig(parents=(-1, 0), rerank=False), "rank_by and rerank must be left out"),
        *((lambda parents=parents: TreeConfig.static(parents), message) for parents, message in (
            ([], "must have at least one node"),
            ([0], r"parents\[0\] must be -1 \(the root\), got 0"),
            ([-1, 1], r"parents\[1\] must be -1 \(the root\) or an earlier node, 0 to 0, got 1"),
            ([-1, 0.0], r"parents\[1\] must be .*, got 0\.0"),
        )),
        *((lambda name=name: dataclasses.replace(DECODER, **{name: 0}), rf"DecoderConfig\.{name} must be .* got 0")
          for name in ("vocab_size", "max_position")),
        (lambda: dataclasses.replace(DECODER, num_kv_heads=3), "num_heads must be a multiple of num_kv_heads=3, got 4"),
        (lambda: dataclasses.replace(DECODER, head_dim=7), "head_dim must be even, got 7"),
        (lambda: dataclasses.replace(DECODER, block="bert"), "block must be one of 'llama', 'gpt2', 'gemma3', got"),
        (lambda: dataclasses.replace(DECODER, windows=(3,) * 9), r"windows must have a window for each of .*, got 9"),
        (lambda: dataclasses.replace(DECODER, windows=(-1,) * DECODER.num_layers), r"windows\[0\] must be an integer"),
        (lambda: dataclasses.replace(DECODER, query_scalar=0), r"query_scalar must be .* got 0"),
        (lambda: MedusaConfig("hydra", 8, 64, prefix=dataclasses.replace(DECODER, windows=(3,) * DECODER.num_layers)),
         "prefix must be a layer without a window, got 3"),
        (lambda: dataclasses.replace(HEAD, draft_vocab_size=65), "at most the target's vocabulary of 64 .*, got 65"),
        (lambda: dataclasses.replace(HEAD, taps=()), r"taps must be one or more states, got \(\)"),
        (lambda: dataclasses.replace(HEAD, kind="medusa"), "kind must be one of 'eagle1', 'eagle3', got 'medusa'"),
    ],
)  # fmt: skip
def test_bad_values_raise(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Example:
    steps: int
    rate: float = 1e-4
    name: str | None = None
    loss: Literal["kl", "lk"] = "kl"
    betas: tuple[float, ...] = (0.9, 0.95)
    output: Path | None = None
    shuffle: bool = True
    tree: TreeConfig = dataclasses.field(default_factory=TreeConfig)
    rope: RopeConfig | None = None


class TestYaml:
    def load(self, tmp_path, text):
        path = tmp_path / "example.yaml"
        path.write_text(text, encoding="utf-8")
        return load_yaml(Example, path)

    def test_every_kind_of_value(self, tmp_path):
        text = """
        steps: 3
        rate: 5e-5      # a string to YAML 1.1
        name: null
        loss: lk
        betas: [0.9, 1]
        output: runs/a
        shuffle: false
        tree: {depth: 4, top_k: 8, num_nodes: 30}
        rope: {theta: 500000}
        """
        assert self.load(tmp_path, text) == Example(
            3, 5e-5, loss="lk", betas=(0.9, 1.0), output=Path("runs/a"), shuffle=False, tree=TreeConfig(4, 8, 30),
            rope=RopeConfig(theta=500000.0),
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("step: 3", r"key must be a known one, got 'step'. Did you mean 'steps'"),
            ("steps: 3\ntree: {top-k: 4}", r"tree: key must be a known one, got 'top-k'. Did you mean 'top_k'"),
            ("steps: 3\n1: 2", r"key must be a known one, got 1. Known keys: steps"),
            ("rate: 1", "the keys steps must be given"),
            ("steps: '3'", r"steps must be int, got '3' \(str\)"),
            ("steps: true", "steps must be int, got True"),
            ("steps: 3\nrate: fast", "rate must be float, got 'fast'"),
            ("steps: 3\nshuffle: 1", "shuffle must be bool, got 1"),
            ("steps: 3\nloss: mse", "loss must be one of 'kl', 'lk', got 'mse'"),
            ("steps: 3\nbetas: [0.9, high]", r"betas\[1\] must be float, got 'high'"),
            ("steps: 3\nbetas: 0.9", r"betas must be a list, got 0.9. Write \[0.9\]"),
            ("steps: 3\ntree: 4", "tree must be TreeConfig, got 4"),
            ("steps: 3\ntree: {num_nodes: 9999}", "tree: TreeConfig.num_nodes must be at most 510"),
            ("steps: 3\nsteps: 4", "line 2: 'steps' must be given once, got it twice"),
            ("- steps", "must be a mapping of keys to values, got a list"),
            ("", "must be a mapping of keys to values, got a NoneType"),
            ("steps: [", "example.yaml: while parsing"),
            ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ],
    )
    def test_bad_files_raise(self, tmp_path, text, message):
        with pytest.raises(ConfigError, match=message) as caught:
            self.load(tmp_path, text)
        assert "example.yaml" in str(caught.value)

    def test_unreadable_files_raise(self, tmp_path):
        (tmp_path / "binary.yaml").write_bytes(b"\x93NUMPY")
        for name, message in (("absent", "No such file or directory"), ("binary", "'utf-8' codec can't decode")):
            with pytest.raises(ConfigError, match=rf"{name}\.yaml: {message}"):
                load_yaml(Example, tmp_path / f"{name}.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_file_of_configs(path, monkeypatch):
    """The program of the first comment loads it, every command in a comment parses, and replies fit the rows."""
    monkeypatch.chdir(path.parent.parent)
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 40
    (program,) = {*re.findall(rf"python -m (train\.\w+) --config configs/{path.name}", text)}
    program = importlib.import_module(program)
    args = load_yaml(program.Args, path)
    if isinstance(args, RunArgs) and args.data:
        monkeypatch.setattr(Source, "check", lambda source: None)  # another command of the file makes the rows
        program.check_run(args)
    for line in re.findall(r"^# python -m (.*?)(?:\s+\(.*)?$", text, flags=re.MULTILINE):
        module, *words = shlex.split(line)
        made = arguments(importlib.import_module(module).Args, None, words)
        if module == "train.regenerate":
            assert (made.target, made.chat_template) == (args.target, args.chat_template)
            assert args.data == (f"{made.out}/*.jsonl",)
            assert made.max_prompt + made.max_new_tokens <= args.length
