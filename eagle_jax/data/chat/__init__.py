"""Converts conversations to tokens and tokens to text: prompts, loss masks, stop tokens, streams."""

from eagle_jax.data.chat.decode import TextStream, decode_stream
from eagle_jax.data.chat.dialogues import Dialogue
from eagle_jax.data.chat.stops import stop_ids, with_stop_ids
from eagle_jax.data.chat.tokenize import chat_ids, chat_template, chat_text, encode_chat
from eagle_jax.data.chat.tokenizers import load_tokenizer, set_chat_template, set_template_args, tokenizer_settings

__all__ = [
    "Dialogue", "TextStream", "chat_ids", "chat_template", "chat_text", "decode_stream", "encode_chat",
    "load_tokenizer", "set_chat_template", "set_template_args", "stop_ids", "tokenizer_settings", "with_stop_ids",
]  # fmt: skip
