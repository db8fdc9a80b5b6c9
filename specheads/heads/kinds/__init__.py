"""Trained drafters, one file per kind. The name of the file is the kind; there is no registry."""
