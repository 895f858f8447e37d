"""Builds drafters: one drafting method per file."""
