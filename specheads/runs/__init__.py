"""The run directory: checkpoints, provenance, metrics and progress."""
