"""Conversations to token ids and loss masks; corpora, packed batches, stored features."""
