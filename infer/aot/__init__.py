"""Compilation for TPUs that are not there: whole programs over abstract weights, their memory and their costs."""
