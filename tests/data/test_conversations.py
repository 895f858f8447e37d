"""Rows to training texts: what is supervised is, letter by letter, what the assistant wrote and what ends its turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle_jax.data.chat.encode import encode
from eagle_jax.data.rows.columns import SkippedRow
from eagle_jax.data.rows.parse import Conversation, parse_row

REPOSITORY = Path(__file__).resolve().parents[2]
# The shape of the published templates, cut down to what decides where a turn begins and ends.
TEMPLATES = {
    "llama3": (
        "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + "
        "m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen3": (  # the generation prompt opens thoughts that the finished turn does not show
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
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
SPECIAL = ["<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>"]
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Two,\nof course."},
    {"role": "user", "content": "Two,\nof course."},  # the user repeats the assistant: a search would find both
    {"role": "assistant", "content": "Ünïted 𝄞."},
]


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    """A token is a byte, or a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = template
    return tokenizer


def metaspace_tokenizer_with(template: str, prepended: str) -> PreTrainedTokenizerFast:
    """A token is a letter, a short word with the blank before it, or a byte, as in SentencePiece's models of Llama 2.

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
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def supervised_texts(tokenizer, encoded) -> list[str]:
    """The decoded runs of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.supervised.astype(int), [0]])))
    return [tokenizer.decode(encoded.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_supervised_is_what_the_assistant_wrote(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    encoded = encode(tokenizer, TALK)
    assert tokenizer.decode(encoded.tokens.tolist()) == tokenizer.apply_chat_template(TALK, tokenize=False)
    lead = " " if name in ("llama2", "vicuna") else ""  # the blank behind [/INST] or ASSISTANT: is generated
    written = [lead + TALK[turn]["content"] + ENDS[name] for turn in (2, 4)]
    assert supervised_texts(tokenizer, encoded) == written


@pytest.mark.parametrize("prepended", ["first", "always", "normalizer"])
@pytest.mark.parametrize("name", ["llama2", "vicuna", "marked"])
def test_supervised_is_what_the_assistant_wrote_in_pieces_with_blanks(name, prepended):
    """The decoder takes a blank off the first piece; a letter in front of the run keeps the run's own."""
    tokenizer = metaspace_tokenizer_with(TEMPLATES[name], prepended)
    encoded = encode(tokenizer, TALK)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert encoded.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    front = tokenizer.convert_tokens_to_ids("x")
    edges = np.flatnonzero(np.diff(np.concatenate([[0], encoded.supervised.astype(int), [0]])))
    found = [tokenizer.decode([front, *encoded.tokens[a:b].tolist()])[1:] for a, b in edges.reshape(-1, 2)]
    lead = "" if name == "marked" else " "
    assert found == [lead + TALK[turn]["content"] + ENDS[name] for turn in (2, 4)]


@pytest.mark.parametrize("kind", [tokenizer_with, lambda template: metaspace_tokenizer_with(template, "first")])
def test_a_marked_span_may_end_within_a_letter_of_several_tokens(kind):
    tokenizer = kind(TEMPLATES["marked"].replace("+ '<|im_end|>' }}{% endg", "}}{% endg"))
    talk = [TALK[1], {"role": "assistant", "content": "Two 𝄞"}]
    assert supervised_texts(tokenizer, encode(tokenizer, talk)) == ["Two 𝄞"]


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


def test_thoughts_that_a_template_cuts_off():
    tokenizer = tokenizer_with(R1)
    talk = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nTwo."}]
    for conversation, wanted in ((talk, ["\n\nTwo.</s>"]), (talk * 2, ["\n\nTwo.</s>"] * 2)):
        assert supervised_texts(tokenizer, encode(tokenizer, conversation)) == wanted


def test_thoughts():
    """Those of earlier replies are gone, as they are when the model writes; those of the last are supervised."""
    tokenizer = tokenizer_with(THINKING)
    talk = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\nTwo."},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "<think>\nHarder.\n</think>\n\nFour."},
    ]
    wanted = ["Two.<|im_end|>", "<think>\nHarder.\n</think>\n\nFour.<|im_end|>"]
    assert supervised_texts(tokenizer, encode(tokenizer, talk)) == wanted
    talk[3] = {"role": "assistant", "content": "Four."}  # an empty thought that the template adds is not the model's
    assert supervised_texts(tokenizer, encode(tokenizer, talk)) == ["Two.<|im_end|>", "Four.<|im_end|>"]


def test_formats():
    openai = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    sharegpt = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "id": 3}
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, openai["messages"][1]]}
    assert parse_row(openai) == parse_row(sharegpt) == parse_row(parts) == Conversation(openai["messages"])
    assert parse_row({"text": "plain", "prompt": "a"}) == "plain"
    asked = Conversation(openai["messages"][:1])
    assert parse_row({"prompt": "a"}) == parse_row({"prompt": openai["messages"][:1]}) == asked


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "neither messages, conversations, text nor prompt$"),
        ({"output": "b", "x": "a"}, r"text nor prompt \(found output, x\)"),
        ({"prompt": 3}, "not a list of messages"),
        ({"text": " "}, "empty text"),
        ({"messages": []}, "an empty conversation"),
        ({"messages": "hi"}, "not a list of messages"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown speaker 'narrator'"),
        ({"messages": [{"role": "user", "content": None}]}, "a message without text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "a part of the type 'image_url', which is not read",
        ),
        ({"messages": ["hi"]}, "a message is not an object"),
    ],
)
def test_rows_without_a_text(row, reason):
    with pytest.raises(SkippedRow, match=reason):
        parse_row(row)


@pytest.mark.parametrize("row", [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}])
def test_rows_without_an_assistant_teach_nothing(row):
    with pytest.raises(SkippedRow, match="no assistant turn"):
        encode(tokenizer_with(TEMPLATES["chatml"]), parse_row(row))


def test_plain_text_is_supervised_from_its_second_token():
    encoded = encode(tokenizer_with(""), "abc")
    assert encoded.supervised.tolist() == [False, True, True]


def test_templates_that_refuse_the_order_of_turns():
    with pytest.raises(SkippedRow, match=r"refuses the conversation \(roles must alternate\)"):
        encode(tokenizer_with(TEMPLATES["llama2"]), [TALK[2], TALK[1]])


@pytest.mark.parametrize("name", ["chatml", "marked"])  # by comparing texts, and by `generation` spans
@pytest.mark.parametrize(
    "shown",
    ["messages[1:]", "messages[-1:]", "messages[:1] + messages[2:]", "messages[:2] + messages[3:]",
     "messages[:3] + messages[4:]", "messages | rejectattr('role', 'equalto', 'user')"],
)  # fmt: skip
def test_templates_that_drop_turns(name, shown):
    """Whoever said it: a head would learn replies to what it is not shown."""
    tokenizer = tokenizer_with(TEMPLATES[name].replace("in messages %", f"in {shown} %"))
    for _ in range(2):  # found out, and remembered
        with pytest.raises(SkippedRow, match="drops a turn"):
            encode(tokenizer, TALK)
    tokenizer.chat_template = TEMPLATES[name]
    assert encode(tokenizer, TALK).supervised.any()


@pytest.mark.parametrize(
    ("name", "system", "user"), [("llama2", "Be brief.", "Hi?"), ("llama3", " Be brief.\n", " Hi?\n")]
)
def test_turns_that_are_merged_or_trimmed_are_not_dropped(name, system, user):
    talk = [{"role": "system", "content": system}, {"role": "user", "content": user}, TALK[4]]
    assert encode(tokenizer_with(TEMPLATES[name]), talk).supervised.any()


@pytest.mark.parametrize("name", ["chatml", "marked"])
def test_nothing_is_lost_of_an_empty_turn(name):
    tokenizer = tokenizer_with(TEMPLATES[name].replace("in messages %", "in messages[1:] %"))
    assert encode(tokenizer, [{"role": "system", "content": "\n"}, *TALK[1:3]]).supervised.any()
    with pytest.raises(SkippedRow, match="drops a turn"):
        encode(tokenizer, TALK[:3])
