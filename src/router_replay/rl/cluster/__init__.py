"""Run a training run on Ray: `cluster.kind = "ray"`.

The driver (`driver.py`) is the process of `router-replay train`. It makes one placement group with an actor for each
trainer rank (`ranks.py`), which runs the code of any other rank, and an actor for each engine (`engines.py`). The
driver owns all actors, so the engines stay when the ranks start again.
"""
