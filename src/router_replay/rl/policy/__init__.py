"""Load the model that learns, compute its losses, prepare its batches, and run its two passes."""
