"""A head-training run: what it is made of, one update, one measurement of tau, one checkpoint."""

from __future__ import annotations

class Run:
    """Everything that a run is made of, on every process alike."""

    def __init__(self, args: Args) -> None:
        self.args = args
        devices = jax.device_count()
        data = args.data_axis or devices // (args.fsdp * args.tensor)
        self.mesh = make_mesh(data, args.tensor, args.fsdp)
        if args.rows % (args.micro_batches * data * args.fsdp):
            raise ConfigError(
                f"--rows {args.rows} must be a multiple of --micro-batches {args.micro_batches} times the {data * args.fsdp} "
                "devices that rows are spread over"
            )
        self.objective = objective_of(args)
        self.target = eagle_jax.load_target(args.target, args.dtype, mesh=self.mesh)
        tokenizer = tokenizer_of(args.target, self.target.config)
        sources = [Source.parse(text) for text in args.data]
        self.corpus, _ = build_corpus(sources, tokenizer, args.out / "data", progress=jax.process_index() == 0)
        self.weights = shares(self.corpus, sources)
        self.heldout = None
        if args.heldout:
            held = [Source.parse(text) for text in args.heldout]
            self.heldout = build_corpus(held, tokenizer, args.out / "data", progress=False)[0]
        self.config = head_config(args, self.target.config)
        self.d2t = None
        if self.config.kind == "eagle3":
            counts = count_tokens(self.corpus.tokens, self.corpus.supervised, self.target.config.vocab_size)
            _, offsets, coverage = draft_vocabulary(counts, self.config.draft_vocab_size)
            self.d2t = jnp.asarray(offsets)
            logging.info("draft vocabulary: %d of %d tokens cover %.2f%% of what is supervised",
                         len(offsets), self.target.config.vocab_size, 100 * coverage)  # fmt: skip
