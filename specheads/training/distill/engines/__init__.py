"""Who answers: one file an engine, each a way to have the base write."""
