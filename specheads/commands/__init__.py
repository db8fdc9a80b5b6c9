"""Commands of `specheads`: one module each, with a `main` that Hydra configures."""
