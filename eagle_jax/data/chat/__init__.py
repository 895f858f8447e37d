"""Converts conversations to tokens and tokens to text: prompts, loss masks, stop tokens, streams."""
