"""Compilation for TPUs that this machine lacks: whole programs over abstract weights, their memory and their costs."""
