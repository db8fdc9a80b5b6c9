"""Ways to draft beside each other: heads, what needs no training, and transformers' own."""
