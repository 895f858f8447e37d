"""Stores tokenised data sets on disk, and reads packed batches and features from them."""

from eagle_jax.data.corpus.documents import Batches, Corpus, coverage, draft_vocabulary
from eagle_jax.data.corpus.features import Features, Layout, Stored, shard_bounds, write_shard
from eagle_jax.data.corpus.files import ENDINGS, read_rows
from eagle_jax.data.corpus.shards import Report, Shard, add_reports, remember
from eagle_jax.data.corpus.sources import Source, build_corpus, corpus_key, hub_rows, is_dataset_name, prompts_by_source

__all__ = [
    "ENDINGS", "Batches", "Corpus", "Features", "Layout", "Report", "Shard", "Source", "Stored", "add_reports",
    "build_corpus", "corpus_key", "coverage", "draft_vocabulary", "hub_rows", "is_dataset_name", "prompts_by_source",
    "read_rows", "remember", "shard_bounds", "write_shard",
]  # fmt: skip
