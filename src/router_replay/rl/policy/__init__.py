"""The model that learns: loading, the losses, the batches it is given, and its two passes."""
