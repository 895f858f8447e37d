"""Reads and writes language models: `load`, `save`; `families` lists what is particular in each."""
