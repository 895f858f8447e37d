"""A random pair small enough to run programs in seconds, in place of the bundled one."""

from __future__ import annotations

import functools
import json

import jax
import pytest

import eagle_jax
from eagle_jax.config import DecoderConfig, HeadConfig, TreeConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from infer import acceptance, bench, chat, cycle, demo

SHAPE = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
}  # fmt: skip
TAPS = {"eagle1": (2,), "hass": (2,), "eagle3": (0, 1, 2)}


class ByteTokenizer:
    """A token is a byte."""

    chat_template = None

    def get_vocab(self):
        return {str(byte): byte for byte in range(256)}

    def encode(self, text, **options):
        return list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=True):
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


@functools.cache
def small_target() -> eagle_jax.Target:
    config = DecoderConfig(num_layers=2, **SHAPE)
    return eagle_jax.Target.from_params(config, init_params(config, jax.random.key(0)))


@functools.cache
def small_head(name: str) -> eagle_jax.DraftHead:
    kind, layer = "eagle3" if name == "eagle3" else "eagle1", DecoderConfig(num_layers=1, **SHAPE)
    config = HeadConfig(
        kind, layer, draft_vocab_size=258, target_hidden_size=32, taps=TAPS[name], fc_bias=kind == "eagle1"
    )
    params = init_head_params(config, jax.random.key(1))
    return eagle_jax.DraftHead.from_params(config, params, small_target(), TreeConfig(depth=2, top_k=2, num_nodes=4))


@pytest.fixture
def pair(monkeypatch):
    """Makes `eagle_jax.load_demo` return the small pair, and the programs use no compilation cache.

    JAX would go on writing to it after the test, whatever its configuration says by then.
    """
    for program in (acceptance, bench, chat, cycle, demo):
        monkeypatch.setattr(program, "use_compilation_cache", lambda: None)

    def load_demo(head="hass", dtype="float32"):
        if dtype != "float32":
            raise ValueError(f"the small pair is float32, not {dtype}")
        return small_target(), small_head(head), ByteTokenizer()

    monkeypatch.setattr(eagle_jax, "load_demo", load_demo, raising=False)
    return small_target()


@pytest.fixture
def tasks(tmp_path):
    """A folder with a task of two conversations, and one whose prompt is too long for the small pair."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    lines = [{"question_id": 1, "turns": ["abc", "again"]}, {"question_id": 2, "turns": ["de"]}]
    (folder / "talk.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (folder / "long.jsonl").write_text(json.dumps({"question_id": 1, "turns": ["x" * 3000]}), encoding="utf-8")
    return folder


OWN_MODULE = """
import eagle_jax

def lookup(target):
    return eagle_jax.prompt_lookup(target, ngram=2, length=3).plain

def head(target):
    return eagle_jax.load_demo("hass")[1].with_tree(eagle_jax.TreeConfig.chain(2, verification="rejection"))

def nothing(target):
    return 3

def two(target, other):
    return None
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """The name of an importable module with methods of the user's own; each test has another name."""
    (tmp_path / f"mine_{tmp_path.name}.py").write_text(OWN_MODULE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return f"mine_{tmp_path.name}"
