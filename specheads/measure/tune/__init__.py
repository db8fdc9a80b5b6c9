"""What to draft with on this machine: trees picked by measurement."""
