"""The run directory: checkpoints, provenance, and where numbers go."""
