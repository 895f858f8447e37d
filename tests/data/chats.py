"""Provides chat templates, tokenizers that hold them, and conversations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[2]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The shape of the published templates, cut down to what decides where a turn begins and ends.
TEMPLATES = {
    "chatml": CHATML,
    # The generation prompt opens thoughts that the finished turn does not show.
    "qwen3": CHATML.replace("assistant\n", "assistant\n<think>\n\n</think>\n\n"),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
        "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set system = '<<SYS>>' + messages[0]['content'] + '<</SYS>>' %}"
        "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "vicuna": (REPOSITORY / "configs" / "templates" / "vicuna.jinja").read_text().strip("\n"),
    "marked": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
}
ENDS = {"llama3": "<|eot_id|>", "chatml": "<|im_end|>", "qwen3": "<|im_end|>", "marked": "<|im_end|>",
        "llama2": " </s>", "vicuna": "</s>"}  # fmt: skip
# The published template of Qwen3 in what concerns thoughts: only replies after the last question show them.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set text = m['content'] %}"
    "{% set thought = '' %}{% if '</think>' in text %}"
    "{% set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}"
    "{% else %}{{ text }}{% endif %}{{ '<|im_end|>\n' }}{% else %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# What DeepSeek-R1-Distill's template does with turns: thoughts go, the blank lines behind them stay.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|User|>' + m['content'] }}{% endif %}"
    "{% if m['role'] == 'assistant' %}{% set content = m['content'] %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two,\nof course."},
    {"role": "user", "content": "Two,\nof course."},  # the user repeats the assistant: a search would find both
    {"role": "assistant", "content": "Ünïted 𝄞."},
]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return _wrapped(core, template)


def metaspace_tokenizer_with(template: str, prepended: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer as SentencePiece's of Llama 2, of letters, bytes and short words with the blank before them.

    Args:
      prepended: which pieces between special tokens get a blank: "always" or "first"; "normalizer" is always, in the
        way of older files.
    """
    words = ["▁Two", "▁of", "▁course", "▁USER", "▁ASS", "ISTANT", "▁One", "▁and", "▁one", "INST", "▁[", "▁[/"]
    merges = list(dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word))))
    letters = ["▁", *map(chr, range(33, 127))]
    vocabulary = dict.fromkeys(["<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters, *map("".join, merges)])
    core = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(vocabulary)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    if prepended == "normalizer":
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=prepended, split=False)
    blanks = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*blanks, decoders.Strip(" ", 1, 0)])
    return _wrapped(core, template, unk_token="<unk>")


def _wrapped(core: Tokenizer, template: str, **special: str) -> PreTrainedTokenizerFast:
    special |= {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": SPECIAL[2:]}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)


def supervised_texts(tokenizer, encoded) -> list[str]:
    """Returns the decoded runs of supervised tokens; a letter before keeps the first blank, which decoders drop."""
    before = tokenizer.convert_tokens_to_ids("x")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.supervised.astype(int), [0]])))
    runs = [encoded.tokens[a:b].tolist() for a, b in edges.reshape(-1, 2)]
    return [tokenizer.decode([before, *run])[1:] for run in runs]
