"""What a training will take: memory by part, tokens, disk and hours. See docs/scale.md."""
