"""What many requests wait for: continuous batching, simulated from measured or computed times."""
