"""The processes of a run: which rank this one is, how ranks talk, and who watches them."""
