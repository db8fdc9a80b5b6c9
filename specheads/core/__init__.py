"""The contracts everything else is written against: trees, features, drafters."""
