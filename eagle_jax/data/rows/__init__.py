"""Reads rows of data sets strictly: the conversation or the text of each."""
