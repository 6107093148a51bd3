"""What a run says of itself: `metrics` writes the numbers of each step to files, `display` shows them in a terminal."""
