"""Self-distilled text: prompts, text engines, filters and shards."""
