"""Reads and writes language models: `load`, `save`; `config` and `gpt2` translate config.json."""
