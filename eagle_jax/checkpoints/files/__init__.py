"""The files of any checkpoint: hub downloads, JSON values, tensors by name, atomic writes, and their one error."""
