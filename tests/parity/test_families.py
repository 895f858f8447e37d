"""Checks logits and hidden states of every family against `transformers`, float32, from its files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install eagle-jax[test]")

import transformers  # noqa: E402

from eagle_jax.checkpoints import load_target_checkpoint, save_target_checkpoint  # noqa: E402
from eagle_jax.models import target_fn  # noqa: E402
from eagle_jax.models.layers import norm_of  # noqa: E402
from tests.parity.tiny import SIZES, random_tokens, randomise, save, tiny_model, torch_outputs  # noqa: E402

TOLERANCE = 1e-4

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.6],
            "long_factor": [2.0, 4.0, 7.0, 9.0]}  # fmt: skip
ROPE = {
    "llama3": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": YARN,
    "yarn_given": YARN | {"rope_theta": 700.0, "factor": 3.0, "original_max_position_embeddings": 400,
                          "attention_factor": 0.9, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn_mscale": YARN | {"factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip
PARTIAL = {"rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 0.65}  # int(6.5) of 10 dimensions
SMOLLM3 = {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
PHI3 = {"head_dim": None, "hidden_size": 48}

GEMMA = {"sliding_window": 9, "query_pre_attn_scalar": 25, "tie_word_embeddings": True}
WINDOW = {"use_sliding_window": True, "sliding_window": 12}

EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 14}
OSS = {"num_local_experts": 7, "num_experts_per_tok": 3, "sliding_window": 9, "swiglu_limit": 1.5,
       "rope_parameters": YARN | {"truncate": False, "rope_theta": 1500.0}}  # fmt: skip
CASES = {
    "llama": ("Llama", {}),
    "llama_plain_heads": ("Llama", {"head_dim": None, "num_key_value_heads": None, "hidden_size": 48}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2}),
    **{f"llama_{name}": ("Llama", {"rope_parameters": rope}) for name, rope in ROPE.items()},
    "mistral": ("Mistral", {"sliding_window": None, "num_key_value_heads": 1}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"head_dim": None, "hidden_size": 48}),
    "qwen2_window": ("Qwen2", {"head_dim": None, "hidden_size": 48, **WINDOW, "max_window_layers": 1}),
    "qwen3_window": ("Qwen3", {**WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen2_tied_yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": ROPE["yarn"]}),
    "qwen3": ("Qwen3", {}),
    "gemma3": ("Gemma3", GEMMA | {"num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "gemma3_untied": (
        "Gemma3",
        GEMMA
        | {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "qwen3_moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        EXPERTS | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "attention_bias": True},
    ),
    "gpt_oss": ("GptOss", OSS),
    "gpt_oss_other": (
        "GptOss",
        OSS
        | {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
            "attention_bias": False,
            "swiglu_limit": 0.4,
            "swiglu_alpha": 1.1,
        },
    ),
    "gpt2": ("GPT2", {"hidden_size": 48, "n_inner": 50, "tie_word_embeddings": True}),
    "gpt2_wide": ("GPT2", {"hidden_size": 36, "layer_norm_epsilon": 1e-2, "tie_word_embeddings": True}),
    "phi3": ("Phi3", PHI3),
    "phi4_mini": ("Phi3", {"num_key_value_heads": 3, "tie_word_embeddings": True, "rope_parameters": PARTIAL}),
    "phi3_longrope": ("Phi3", PHI3 | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [0, 1, 0, 1], "rope_parameters": {"rope_theta": 5e6}}),
    "smollm3_interval": ("SmolLM3", SMOLLM3),
    "qwen3_biases": ("Qwen3", {"attention_bias": True, "head_dim": 16, "rope_parameters": {"rope_theta": 1e6}}),
}  # fmt: skip


def jax_outputs(config, params, tokens):
    """Logits and all hidden states of one causal pass."""
    batch, length = tokens.shape
    fn = target_fn(config)
    positions = jnp.broadcast_to(jnp.arange(length)[None], (batch, length))
    taps = tuple(range(config.num_layers + 1))

    @jax.jit
    def run(params, tokens):
        out = fn.forward(params, tokens, positions, jnp.tril(jnp.ones((length, length), bool)), None, taps)
        return fn.logits(params, out.hidden), out.features

    logits, features = run(params, jnp.asarray(tokens))
    return np.asarray(logits), np.split(np.asarray(features), len(taps), axis=-1)


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


SLOW = (
    "gemma3_untied",
    "gpt_oss_other",
    "phi4_mini",
    "qwen2_tied_yarn",
    "qwen3_biases",
    "qwen3_moe_mixed",
    "smollm3_interval",
)


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES])
def test_logits_and_hidden_states(case, tmp_path):
    family, changes = CASES[case]
    model = tiny_model(family, **changes)
    save(model, tmp_path, shards=len(case) % 2 == 0)  # either way of writing, over the cases
    config, params = load_target_checkpoint(tmp_path)
    tokens = random_tokens(60)
    logits, states = torch_outputs(model, tokens)
    our_logits, our_states = jax_outputs(config, params, tokens)
    close(our_logits, logits)
    assert len(states) == len(our_states) == config.num_layers + 1
    for ours, theirs in zip(our_states, states, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("case", ["llama", "gemma3", "gpt_oss"])
def test_a_norm_rounds_where_that_of_its_family_does(case, tmp_path):
    """Before the product with the weight or after it; in float32 the two are the same."""
    family, changes = CASES[case]
    model = tiny_model(family, **changes).to(torch.bfloat16)
    config, params = load_target_checkpoint(save(model, tmp_path), "bfloat16")
    x = torch.randn(20, 42, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    with torch.no_grad():
        theirs = model.model.norm(x).float().numpy()
    ours = norm_of(config).apply({"params": params["norm"]}, jnp.asarray(x.float().numpy(), "bfloat16"))
    np.testing.assert_array_equal(np.asarray(ours, np.float32), theirs)


def test_the_text_model_of_a_model_of_images(tmp_path):
    """Its tensors have a prefix, and the image tower is not read."""
    text = {**SIZES, **GEMMA, "pad_token_id": 0}
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    config._attn_implementation = "eager"
    model = randomise(transformers.Gemma3ForConditionalGeneration(config).eval(), 0)
    save(model, tmp_path)
    config, params = load_target_checkpoint(tmp_path)
    tokens = random_tokens(60)
    close(jax_outputs(config, params, tokens)[0], torch_outputs(model, tokens)[0])
    assert config.architecture == "Gemma3ForCausalLM"


def test_dynamic_rope_is_that_of_decoding_token_by_token(tmp_path):
    """Beyond the original length the base grows with every token, and each key keeps the base it was made with."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    model = tiny_model("Llama", rope_parameters=rope, max_position_embeddings=24)
    save(model, tmp_path)
    config, params = load_target_checkpoint(tmp_path)
    tokens = random_tokens(40, rows=1)
    rows, cache = [], None
    with torch.no_grad():
        for position in range(tokens.shape[1]):
            step = torch.tensor(tokens[:, position : position + 1], dtype=torch.long)
            out = model(step, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            rows.append(out.logits.numpy())
    ours, _ = jax_outputs(config, params, tokens)
    close(ours, np.concatenate(rows, axis=1))


def test_longrope_takes_the_factors_of_the_loaded_context_length(tmp_path):
    """`transformers` takes the long factors for every position as soon as one is beyond the original length."""
    model = tiny_model("Phi3", **PHI3, rope_parameters=dict(LONGROPE), original_max_position_embeddings=32)
    save(model, tmp_path)
    tokens = random_tokens(60)
    for cap in (256, 100):
        config, params = load_target_checkpoint(tmp_path, max_position=cap)
        assert config.max_position == cap and config.rope.is_long
        close(jax_outputs(config, params, tokens)[0], torch_outputs(model, tokens)[0])
    with pytest.warns(UserWarning, match="the context length is 32, within which longrope .* Pass max_position=256"):
        config, params = load_target_checkpoint(tmp_path)
    assert config.max_position == 32 and not config.rope.is_long
    close(jax_outputs(config, params, tokens[:, :32])[0], torch_outputs(model, tokens[:, :32])[0])


@pytest.mark.parametrize("case", ["llama", "llama_tied", "llama_biases", "llama_llama3", "llama_yarn_given", "mistral",
                                  "mistral_window", "qwen2_tied_yarn", "qwen2_window", "qwen3", "qwen3_window",
                                  "gemma3", "gemma3_untied", "qwen3_moe_mixed", "gpt_oss", "gpt2", "phi4_mini",
                                  "phi3_longrope", "smollm3"])  # fmt: skip
def test_transformers_loads_what_we_save(case, tmp_path):
    from transformers import AutoModelForCausalLM

    family, changes = CASES[case]
    model = tiny_model(family, **(changes | {"eos_token_id": [2, 5]}))
    config, params = load_target_checkpoint(save(model, tmp_path / "theirs"))
    save_target_checkpoint(config, params, tmp_path / "ours", "float32", max_shard_bytes=40_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    assert type(again) is type(model)
    assert again.generation_config.eos_token_id == [2, 5]
    tokens = random_tokens(40)
    logits, _ = torch_outputs(model, tokens)
    np.testing.assert_array_equal(torch_outputs(again, tokens)[0], logits)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16")],
)
def test_half_precision_weights_are_converted_as_torch_does(stored, dtype, tmp_path):
    model = tiny_model("Llama").to(getattr(torch, stored))
    model.save_pretrained(tmp_path)
    _, params = load_target_checkpoint(tmp_path, dtype)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {dtype}
    expected = model.state_dict()["lm_head.weight"].to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(np.asarray(params["lm_head"]["weight"], np.float32), expected)
