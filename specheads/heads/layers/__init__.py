"""What kinds of head share: attention and blocks."""
