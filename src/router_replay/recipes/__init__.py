"""Ready-made models and runs, made with `router_replay.rl`."""
