"""Holds what a caller uses: targets, drafters, generation, sessions, profiles."""
