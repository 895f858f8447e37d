"""Renders chat templates, and finds their arguments and the characters that the assistant wrote."""
