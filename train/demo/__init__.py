"""Builds the data of the bundled weights."""
