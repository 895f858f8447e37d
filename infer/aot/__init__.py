"""Compiles whole programs over abstract weights for TPUs that this machine lacks."""
