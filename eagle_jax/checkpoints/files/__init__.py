"""Reads and writes the files of a checkpoint: downloads, JSON values, tensors, atomic writes."""
