"""Contracts that all other code uses: trees, features and drafters."""
