"""Reads and writes language models: `files`; `families` lists the differences between them."""
