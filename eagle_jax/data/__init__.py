"""Converts conversations to token ids and loss masks; stores corpora and features; packs batches."""
