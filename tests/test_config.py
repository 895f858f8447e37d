"""Configurations: what is refused, with which bound, and how a YAML file becomes a dataclass."""

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

import train.head
import train.regenerate
from eagle_jax.config import (
    EAGLE1_PARENTS,
    ConfigError,
    DecoderConfig,
    HeadConfig,
    RopeConfig,
    TreeConfig,
    sibling_ranks,
    static_depths,
)
from eagle_jax.core.loop import required_slots
from eagle_jax.data.corpus.sources import Source
from eagle_jax.models.presets import model
from eagle_jax.runtime.request import PREFILL_CHUNK, bucket
from eagle_jax.settings import from_mapping, load_yaml
from infer.aot import CHIPS
from infer.common.programs import arguments
from train.loop.options import RunArgs

CONFIGS = sorted((Path(__file__).resolve().parent.parent / "configs").glob("*.yaml"))
TARGETS = {  # of the configurations for slices, whose regeneration must fit; what presets calls them
    "llama31_8b": "llama-3.1-8b",
    "llama33_70b": "llama-3.3-70b",
    "qwen3_8b": "qwen3-8b",
    "r1_distill_llama_8b": "deepseek-r1-distill-llama-8b",
    "vicuna_13b": "vicuna-13b",
}
CHIPS_PER_HOST = 4
DECODER = DecoderConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8
)


class TestTree:
    @given(st.integers(1, 8), st.integers(1, 10))
    def test_the_pool_is_the_bound(self, depth, top_k):
        pool = top_k + (depth - 1) * top_k**2
        assert TreeConfig(depth=depth, top_k=top_k, num_nodes=pool).pool_size == pool
        with pytest.raises(ConfigError, match=rf"num_nodes={pool + 1} exceeds the {pool} candidates"):
            TreeConfig(depth=depth, top_k=top_k, num_nodes=pool + 1)

    def test_without_rerank_the_pool_is_the_frontiers(self):
        assert TreeConfig(depth=3, top_k=4, num_nodes=12, rerank=False).num_nodes == 12
        with pytest.raises(ConfigError, match=r"exceeds the 12 candidates.*rerank is off"):
            TreeConfig(depth=3, top_k=4, num_nodes=13, rerank=False)

    def test_fewer_nodes_than_levels(self):
        with pytest.raises(ConfigError, match=r"num_nodes=5 is below depth=6.*at most 5"):
            TreeConfig(depth=6, top_k=10, num_nodes=5)

    @pytest.mark.parametrize("name", ["depth", "top_k", "num_nodes"])
    @pytest.mark.parametrize("value", [0, -1, 2.0, "8", True, None])
    def test_sizes_are_positive_integers(self, name, value):
        with pytest.raises(ConfigError, match=rf"TreeConfig\.{name}=.* must be an integer of at least 1"):
            TreeConfig(**{name: value})

    def test_unknown_ranking(self):
        with pytest.raises(ConfigError, match="rank_by='probability' must be 'value' or 'confidence'"):
            TreeConfig(rank_by="probability")  # type: ignore[arg-type]

    @given(st.integers(1, 64))
    def test_chain(self, length):
        chain = TreeConfig.chain(length)
        assert (chain.depth, chain.top_k, chain.num_nodes, chain.pool_size) == (length, 1, length, length)

    def test_chain_of_nothing(self):
        with pytest.raises(ConfigError, match="at least 1"):
            TreeConfig.chain(0)

    @given(st.data())
    def test_static_tree_follows_from_its_parents(self, data):
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

    def test_the_static_tree_of_eagle1(self):
        tree = TreeConfig.static(EAGLE1_PARENTS)
        assert (tree.num_nodes, tree.depth, tree.top_k) == (25, 5, 4)
        levels = collections.Counter(static_depths(EAGLE1_PARENTS))
        assert [levels[depth] for depth in range(1, 6)] == [4, 8, 8, 3, 2]

    @pytest.mark.parametrize(
        ("parents", "message"),
        [
            ([], "empty"),
            (None, "empty"),
            (3, "parents=3 must be a list with the parent of every node"),
            ([0], r"parents\[0\]=0 must be -1 \(the root\):"),
            ([-1, 1], r"parents\[1\]=1 must be -1 \(the root\) or the index of an earlier node, 0 to 0"),
            ([-1, -2], r"parents\[1\]=-2"),
            ([-1, 0.0], r"parents\[1\]=0\.0"),
        ],
    )
    def test_impossible_parents(self, parents, message):
        with pytest.raises(ConfigError, match=message):
            TreeConfig.static(parents)

    def test_parents_and_a_size_that_contradicts_them(self):
        with pytest.raises(ConfigError, match=r"depth=4 contradicts parents, which give depth=2"):
            TreeConfig(depth=4, parents=(-1, 0))

    def test_hashable_and_equal(self):
        assert hash(TreeConfig()) == hash(TreeConfig(depth=6, top_k=10, num_nodes=59))
        assert TreeConfig.static([-1, 0]) != TreeConfig.chain(2)


class TestModels:
    def test_heads_are_a_multiple_of_groups(self):
        with pytest.raises(ConfigError, match="num_attention_heads=4 is not a multiple of num_key_value_heads=3"):
            dataclasses.replace(DECODER, num_kv_heads=3)

    def test_odd_head_dim(self):
        with pytest.raises(ConfigError, match="head_dim=7 must be even"):
            dataclasses.replace(DECODER, head_dim=7)

    @pytest.mark.parametrize("name", ["vocab_size", "num_layers", "num_kv_heads", "max_position"])
    def test_sizes(self, name):
        with pytest.raises(ConfigError, match=rf"DecoderConfig\.{name}=0"):
            dataclasses.replace(DECODER, **{name: 0})

    def test_heads(self):
        head = HeadConfig("eagle3", DECODER, draft_vocab_size=64, target_hidden_size=32, taps=(1, 2, 3))
        with pytest.raises(ConfigError, match="draft_vocab_size=65 exceeds the target's vocabulary of 64"):
            dataclasses.replace(head, draft_vocab_size=65)
        with pytest.raises(ConfigError, match=r"taps=\(\)"):
            dataclasses.replace(head, taps=())
        with pytest.raises(ConfigError, match="kind='medusa' must be"):
            dataclasses.replace(head, kind="medusa")


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
            steps=3,
            rate=5e-5,
            loss="lk",
            betas=(0.9, 1.0),
            output=Path("runs/a"),
            shuffle=False,
            tree=TreeConfig(depth=4, top_k=8, num_nodes=30),
            rope=RopeConfig(theta=500000.0),
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("step: 3", r"unknown key 'step'. Did you mean 'steps'"),
            ("steps: 3\ntree: {top-k: 4}", r"tree: unknown key 'top-k'. Did you mean 'top_k'"),
            ("steps: 3\n1: 2", r"unknown key 1. Known keys: steps"),
            ("rate: 1", "missing steps"),
            ("steps: '3'", r"steps='3' must be int, found str"),
            ("steps: true", "steps=True must be int, found bool"),
            ("steps: 2.5", "steps=2.5 must be int, found float"),
            ("steps: 3\nrate: fast", "rate='fast' must be float"),
            ("steps: 3\nshuffle: 1", "shuffle=1 must be bool, found int"),
            ("steps: 3\nloss: mse", "loss='mse' must be one of 'kl', 'lk'"),
            ("steps: 3\nbetas: [0.9, high]", r"betas\[1\]='high' must be float"),
            ("steps: 3\nbetas: 0.9", "betas=0.9 must be a list, such as"),
            ("steps: 3\ntree: 4", "tree=4 must be TreeConfig, found int"),
            ("steps: 3\ntree: {num_nodes: 9999}", "tree: TreeConfig.num_nodes=9999 exceeds the 510 candidates"),
            ("steps: 3\nsteps: 4", "line 2: 'steps' is given twice"),
            ("- steps", "expected a mapping of keys to values, found list"),
            ("", "expected a mapping of keys to values, found NoneType"),
            ("steps: [", "example.yaml: while parsing"),
            ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ],
    )
    def test_what_is_refused_and_how(self, tmp_path, text, message):
        with pytest.raises(ConfigError, match=message) as caught:
            self.load(tmp_path, text)
        assert "example.yaml" in str(caught.value)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(ConfigError, match="no such configuration file"):
            load_yaml(Example, tmp_path / "absent.yaml")

    def test_a_mapping_without_a_file(self):
        assert from_mapping(Example, {"steps": 1}) == Example(steps=1)


def commented(path: Path) -> list[list[str]]:
    """The commands in the comments that a configuration begins with, as words."""
    lines = re.findall(r"^# python -m (.*?)(?:\s+\(.*)?$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


class TestFiles:
    """What lies in `configs/`."""

    def test_all_are_seen(self):
        assert {path.stem for path in CONFIGS} >= {*TARGETS, "tiny_cpu", "demo_hass", "demo_eagle3"}

    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_every_file_loads(self, path, monkeypatch):
        """Into the arguments of the program that the first comment names."""
        text = path.read_text(encoding="utf-8")
        named = re.findall(rf"python -m (train\.\w+) --config configs/{path.name}", text)
        assert len(set(named)) == 1
        assert text.count("\n") <= 40
        program = importlib.import_module(named[0])
        args = load_yaml(program.Args, path)
        if isinstance(args, RunArgs) and args.data:
            monkeypatch.setattr(Source, "check", lambda source: None)  # another command of the file makes the rows
            program.check(args)

    @pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
    def test_every_command_in_a_comment_parses(self, path, monkeypatch):
        monkeypatch.chdir(path.parent.parent)
        for module, *words in commented(path):
            arguments(importlib.import_module(module).Args, None, words)

    @pytest.mark.parametrize("name", TARGETS)
    def test_regeneration_fits(self, name):
        """Weights and cache of a host's share leave a quarter of the memory free, and no reply is longer than a row."""
        path = next(path for path in CONFIGS if path.stem == name)
        chip = re.search(r"^# Hardware:.*?\b(v5e|v5p)\b", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        words = next(words for module, *words in commented(path) if module == "train.regenerate")
        args = arguments(train.regenerate.Args, None, words)
        head = load_yaml(train.head.Args, path)
        assert (args.target, args.chat_template) == (head.target, head.chat_template)
        assert head.data == (f"{args.out}/*.jsonl",)
        assert args.max_prompt + args.max_new_tokens <= head.length
        config = model(TARGETS[name])
        assert CHIPS_PER_HOST % args.tensor == 0 == config.num_kv_heads % args.tensor
        heads = 2 * config.num_heads + 2 * config.num_kv_heads  # of q and o, of k and v
        layer = config.hidden_size * (heads * config.head_dim + 3 * config.intermediate_size)
        number = (
            2 * config.vocab_size * config.hidden_size + config.num_layers * layer
        )  # none of these ties its embeddings
        slots = required_slots(bucket(args.max_prompt), bucket(args.max_new_tokens), depth=0, chunk=PREFILL_CHUNK)
        token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        lanes = args.batch * args.tensor / CHIPS_PER_HOST
        assert args.dtype == "bfloat16"
        assert 2 * (number + token * slots * lanes) / args.tensor < 0.75 * CHIPS[chip.group(1)].hbm
