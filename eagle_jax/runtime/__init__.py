"""Holds the user's interface: targets, drafters, generation, sessions, profiles."""
