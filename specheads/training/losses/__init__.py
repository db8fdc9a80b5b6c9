"""Losses of all depths, fused with the vocabulary projection; see docs/losses.md."""
