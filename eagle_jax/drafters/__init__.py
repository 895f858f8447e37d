"""Drafting methods: one file each, every one builds a `Drafter`."""
