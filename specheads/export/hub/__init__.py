"""What the Hub gets of a run: its card, its files, and one commit."""
