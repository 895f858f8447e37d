"""Holds the pure functions of training: losses and steps of heads, draft models and small targets."""
