"""Stores tokenised data sets on disk, and reads packed batches and features from them."""
