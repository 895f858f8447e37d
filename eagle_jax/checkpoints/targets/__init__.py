"""Reads and writes language models: `load`, `save`; `families` lists the differences between them."""
