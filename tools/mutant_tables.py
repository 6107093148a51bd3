"""The two tables of tools/mutants.py: which tests stand beside a module, and which changes change nothing."""

from __future__ import annotations

TESTS: dict[str, tuple[str, ...]] = {
    # A pattern of paths below src/router_replay (the first that fits counts): the tests beside it, fast ones first.
    "stitch/*.py": ("tests/stitch/test_trajectory.py", "tests/stitch/test_machine.py"),
    "batch/tensors.py": ("tests/batch/test_tensors.py",),
    "batch/*.py": ("tests/batch",),
    "routes.py": ("tests/test_routes.py",),
    "row_checks.py": ("tests/test_routes.py",),
    "runs.py": ("tests/test_runs.py",),
    "spec.py": ("tests/test_spec.py",),
    "wire/peers/*.py": (
        "tests/wire/test_peers_text.py",
        "tests/wire/test_peers_objects.py",
        "tests/wire/test_peers.py",
        "tests/wire/test_peers_bad_input.py",
    ),
    "wire/dense.py": ("tests/wire/test_dense.py", "tests/wire/test_envelope.py"),
    "wire/*.py": (
        "tests/wire/test_sets.py",
        "tests/wire/test_dense.py",
        "tests/wire/test_cost.py",
        "tests/wire/test_envelope.py",
    ),
    "measure/*.py": ("tests/measure",),
    "rl/*losses.py": ("tests/rl/test_losses.py",),
    "rl/*advantages.py": ("tests/rl/test_advantages.py",),
    "rl/delivery.py": ("tests/rl/test_delivery.py",),
    "replay/selection.py": ("tests/replay/test_selection.py",),
    "replay/special.py": ("tests/replay/test_selection.py",),
    "replay/state.py": ("tests/replay/test_state.py", "tests/replay/test_replayer.py", "tests/replay/test_blocks.py"),
}

EQUIVALENT: dict[str, str] = {
    # A piece of the changed line that the unchanged one does not have: why no test can tell them apart.
}
