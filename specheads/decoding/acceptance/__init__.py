"""What is kept of a verified tree, and the random numbers it takes."""
