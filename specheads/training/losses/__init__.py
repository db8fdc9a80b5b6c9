"""Losses of drafted depths, fused with the vocabulary projection; see docs/losses.md."""
