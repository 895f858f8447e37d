"""Reads and writes the files of a checkpoint: hub downloads, JSON values, named tensors, atomic writes."""
