"""A random pair small enough to run the programs in seconds, in the place of the bundled one."""

from __future__ import annotations

import jax
import pytest

import eagle_jax
from eagle_jax.config import DecoderConfig, HeadConfig, TreeConfig
from eagle_jax.models.decoder import init_params
from eagle_jax.models.heads import init_head_params
from infer import bench, chat, cycle, demo


class ByteTokenizer:
    """A token is a byte."""

    chat_template = None

    def get_vocab(self):
        return {str(byte): byte for byte in range(256)}

    def encode(self, text, **options):
        return list(text.encode())

    def decode(self, tokens, *, skip_special_tokens=True):
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")


@pytest.fixture
def pair(monkeypatch):
    """Makes `eagle_jax.load_demo` return the small pair, and the programs use no compilation cache.

    JAX would go on writing to it after the test, whatever its configuration says by then.
    """
    for program in (bench, demo, cycle):
        monkeypatch.setattr(program, "use_compilation_cache", lambda: None)
    config = DecoderConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
    )
    target = eagle_jax.Target.from_params(config, init_params(config, jax.random.key(0)))
    layer = DecoderConfig(
        vocab_size=258, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8
    )
    tree = TreeConfig(depth=2, top_k=2, num_nodes=4)
    taps = {"eagle1": (2,), "hass": (2,), "eagle3": (0, 1, 2)}

    def load_demo(head="hass", dtype="float32"):
        if dtype != "float32":
            raise ValueError(f"the small pair is float32, not {dtype}")
        kind = "eagle3" if head == "eagle3" else "eagle1"
        head_config = HeadConfig(
            kind, layer, draft_vocab_size=258, target_hidden_size=32, taps=taps[head], fc_bias=kind == "eagle1"
        )
        params = init_head_params(head_config, jax.random.key(1))
        return target, eagle_jax.DraftHead.from_params(head_config, params, target, tree), ByteTokenizer()

    monkeypatch.setattr(eagle_jax, "load_demo", load_demo, raising=False)
    return target


@pytest.fixture
def make_chat(pair, monkeypatch):
    """Makes a chat of the small pair; what it writes is kept."""
    from tests.infer.chats import Templated

    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def of(tokenizer=None, **options):
        args = chat.Args(**{"method": "hass", "max_new_tokens": 12, "context": 400} | options)
        _, drafter, _ = eagle_jax.load_demo("hass")
        written: list[str] = []
        found = chat.Chat(args, pair, drafter, tokenizer or Templated(), written.append)
        found.written = written
        return found

    return of
