"""Trained drafters, one file a kind. The file's name is the kind: there is no registry."""
