"""The frozen base: load it, read text with it, verify trees with it, and never change it."""
