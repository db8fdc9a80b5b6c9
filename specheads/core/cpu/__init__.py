"""What serves CPUs only: memory layouts of weights, and sums in a fixed order."""
