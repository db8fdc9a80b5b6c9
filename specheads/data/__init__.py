"""Text as the trainer and the meter want it: corpora, packed batches, prompts, fingerprints."""
