"""Tokenised data sets on disk: rows in, packed batches and stored features out."""
