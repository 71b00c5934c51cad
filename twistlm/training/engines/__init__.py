"""Ways to carry a round: one file each."""
