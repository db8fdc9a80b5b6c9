"""Heads: build and load them; kinds/ has one file per kind."""
