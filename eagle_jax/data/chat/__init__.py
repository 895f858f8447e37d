"""Conversations and tokens: tokenizers, prompts, training texts with loss masks, stop tokens, decoded streams."""
