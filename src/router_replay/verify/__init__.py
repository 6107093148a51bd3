"""Verify that the rows of an engine belong to its tokens, and name the fault if they do not.

`evidence`, `hypotheses`, `diagnosis` and `inject` are NumPy only; `passes` runs the model, and `run` joins them.
"""
