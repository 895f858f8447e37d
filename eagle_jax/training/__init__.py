"""Losses, training-time test and training steps of draft heads, draft models and small targets. Pure functions."""
