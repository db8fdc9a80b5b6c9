"""Heads: loaded, built, filled and kept from strangers' harm; kinds/ has one file a head."""
