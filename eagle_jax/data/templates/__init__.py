"""Renders chat templates, and finds what they read and which characters the assistant wrote."""
