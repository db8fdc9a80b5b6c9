"""Text that the base of a head generates, for its distilled phases."""
