"""How a drafter's guesses become a token tree."""
