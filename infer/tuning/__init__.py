"""What infer.tune measures and searches."""
