"""Tests config.json of EAGLE heads: the keys of every project, errors and warnings."""

from __future__ import annotations

import dataclasses

import pytest

from eagle_jax.checkpoints import CheckpointError, load_head_checkpoint
from tests.checkpoints.common import quiet
from tests.checkpoints.random_heads import TARGET, eagle1, eagle3, write

IDS = {"eagle_aux_hidden_state_layer_ids": [0, 3, 7]}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention"]}


def load(directory, head, target=TARGET, **kwargs):
    return load_head_checkpoint(write(directory, *head), target, **kwargs)[0]


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (eagle1, {"hidden_act": "relu"}, "hidden_act must be silu or absent, got 'relu'"),
        (eagle3, {"sliding_window": 64, "use_sliding_window": True}, "sliding_window must be at least .*, got 64"),
        (eagle3, SLIDING, "sliding_window must be at least .*, got 64"),
        (eagle3, {"layer_types": ["linear_attention"]}, "layer_types must be full_attention or sliding_attention"),
        (eagle3, {"embedding_multiplier": 12.0}, r"embedding_multiplier must be 1 or absent, got 12\.0"),
        (eagle3, {"eagle_config": {"use_last_layernorm": False}}, r"eagle_config\.use_last_layernorm must be true or"),
        (eagle3, {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state must be true or absent"),
        (eagle3, {"eagle_config": {"block_size": 16}}, r"eagle_config\.block_size must be absent, got 16"),
        (eagle3, {"ptd_token_id": 0}, "ptd_token_id must be absent, got 0"),
        (eagle3, {"num_hidden_layers": "1"}, "num_hidden_layers must be an integer from 1 to .*, got '1'"),
        (eagle3, {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, and there are 3 taps"),
        *((eagle3, {"architectures": [name]}, f"architectures must be an EAGLE head .*, got .*{name}")
          for name in ("PEagleDraftModel", "GemmaForCausalLM")),
        (eagle3, {"parallel_draft_step": 4}, "parallel_draft_step must be 1 or absent, got 4"),
        (eagle3, {"speculators_model_type": "eagle"}, "speculators_model_type must be 'eagle3', got 'eagle'"),
        (eagle3, {"draft_vocab_size": 60}, "draft_vocab_size must be at most the target.s vocabulary of 53"),
        (eagle1, {"is_causal": False}, "is_causal must be true or absent, got False"),
    ],
)  # fmt: skip
def test_an_option_that_changes_the_drafts_is_refused(make, changes, message, tmp_path):
    config, tensors = make()
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, (config | changes, tensors))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 64}, "sliding_window=64 has no effect here"),
        ({"num_hidden_layers": 32}, "num_hidden_layers is 32, but an EAGLE head has 1"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, but the file has 'an lm_head of its own'"),
        ({"target_model_type": "gemma3_text"}, "target_model_type is 'gemma3_text', but the target is a 'Llama"),
        (
            {"speculators_config": {"verifier": {"architectures": ["Qwen3ForCausalLM"]}}},
            r"config\.verifier\.architectures is \['Qwen3ForCausalLM'\], but the target is a 'LlamaForCausalLM'",
        ),
        ({"use_fancy_gate": True, "logit_scaling": 0.5}, r"use_fancy_gate=True, logit_scaling=0\.5: unknown"),
        ({"eagle_config": {"use_fancy_gate": 1}}, r"eagle_config\.use_fancy_gate=1: unknown"),
    ],
)
def test_an_option_without_effect_is_a_warning(changes, message, tmp_path):
    with pytest.warns(UserWarning, match=message):
        load(tmp_path, eagle3(**changes))


def test_the_keys_of_published_heads_are_read_without_a_warning(tmp_path):
    """Keys of the heads of SpecForge, NVIDIA and RedHat, at the values of a plain head."""
    changes = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0,
        "head_dim": None, "initializer_range": 0.02, "pretraining_tp": 1, "tie_word_embeddings": False,
        "rope_scaling": None, "sliding_window": 32, "use_sliding_window": False, "max_window_layers": 48,
        "torch_dtype": "bfloat16", "transformers_version": "4.53.2", "use_cache": True, "target_model_type": "llama",
        "norm_before_residual": False, "norm_output": None, "embed_requires_grad": False, "is_causal": True,
        "eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 3, "layer_types": ["full_attention"],
        "parallel_drafting": False, "block_size": None,
        "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [], "use_mtp_layernorm": False,
            "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "next_layer_regular": True,
            "parallel_draft_step": 1,
        },
    }  # fmt: skip
    config, tensors = eagle3(**changes)
    with quiet():
        assert load(tmp_path, (config | {"target_hidden_size": None}, tensors)).taps == (2, 4, 6)


def test_switches(tmp_path):
    """Inside `eagle_config`, or known by the tensors alone."""
    loaded = load(tmp_path, eagle3(eagle_config={"norm_output": True, "norm_before_residual": True}))
    assert loaded.norm_output and loaded.norm_before_residual
    config, tensors = eagle3(fc_norm=True, norm_before_fc=True, attention_bias=True, qk_norm_tensors=True)
    for key in ("fc_norm", "norm_before_fc", "attention_bias"):
        del config[key]
    loaded = load(tmp_path, (config, tensors))
    layer = loaded.layer
    assert loaded.fc_norm and loaded.norm_before_fc and layer.qkv_bias and layer.out_bias and layer.qk_norm


def test_norm_before_residual_is_on_by_default_in_the_speculators_layout(tmp_path):
    config, tensors = eagle3()
    values = {"speculators_model_type": "eagle3", "transformer_layer_config": config, "draft_vocab_size": 17}
    assert load(tmp_path, (values, tensors)).norm_before_residual


@pytest.mark.parametrize(
    ("head", "options", "taps"),
    [
        (eagle3(), {}, (2, 4, 6)),  # 2, L // 2, L - 3 of 9 layers
        (eagle3(eagle_config=IDS), {}, (1, 4, 8)),  # layers whose OUTPUT is taken: hidden_states[i + 1] of transformers
        (eagle3(**IDS), {}, (0, 3, 7)),  # layers that the state ENTERS: hidden_states[i]
        (eagle3(**IDS, eagle_config=IDS), {"taps": (1, 4, 7)}, (1, 4, 7)),
        (eagle3(taps=4), {"taps": (1, 2, 3, 4)}, (1, 2, 3, 4)),
        (eagle1(), {}, (9,)),
    ],
)
def test_taps(head, options, taps, tmp_path):
    assert load(tmp_path, head, **options).taps == taps


SHALLOW, OTHER_VOCAB, OTHER_WIDTH = (
    dataclasses.replace(TARGET, **change) for change in ({"num_layers": 2}, {"vocab_size": 64}, {"hidden_size": 32})
)


@pytest.mark.parametrize(
    ("head", "target", "options", "message"),
    [
        (eagle3(**IDS, eagle_config=IDS), TARGET, {}, r"the same hidden states, got \(1, 4, 8\) and \(0, 3, 7\)"),
        (eagle3(taps=4), TARGET, {}, "fc reads 96 features, which is 4 taps of hidden size 24, not 3 .*another target"),
        (eagle3(), SHALLOW, {}, r"taps \[-1\] do not exist, the target has hidden states 0 to 2"),
        (eagle1(), TARGET, {"taps": (2, 4, 6)}, r"taps must be \(9,\), the final state, for an EAGLE-1/2 head"),
        (eagle1(), OTHER_VOCAB, {}, "vocab_size is 53, the target's 64: a head for another target"),
        (eagle3(), OTHER_WIDTH, {}, "hidden size is 24, the target's 32: a head for another target"),
        (eagle1(target_hidden_size=24, hidden_size=36), TARGET, {}, "hidden size is 24 and 36, the target's 24"),
        (eagle3(), TARGET, {"rope_theta": float("nan")}, "rope_theta must be a positive number, got nan"),
    ],
)
def test_another_target(head, target, options, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, head, target, **options)


def test_rope_theta_may_be_replaced(tmp_path):
    assert load(tmp_path, eagle3(), rope_theta=10000).layer.rope.theta == 10000.0
