"""Train a head: the one loop, its phases, its objective, and what is shown meanwhile."""
