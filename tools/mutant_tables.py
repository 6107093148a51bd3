"""The two tables of tools/mutants.py: which tests stand beside a module, and which changes change nothing."""

from __future__ import annotations

TESTS: dict[str, tuple[str, ...]] = {
    # A pattern of paths below src/router_replay (the first that fits counts): the tests beside it, fast ones first.
    "stitch/*.py": ("tests/stitch/test_trajectory.py", "tests/stitch/test_machine.py"),
    "batch/tensors.py": ("tests/batch/test_tensors.py", "tests/batch/test_local.py"),
    "batch/*.py": ("tests/batch",),
    "routes.py": ("tests/test_routes.py",),
    "row_checks.py": ("tests/test_routes.py",),
    "runs.py": ("tests/test_runs.py",),
    "spec.py": ("tests/test_spec.py",),
    "wire/peers/megatron.py": ("tests/wire/test_peer_megatron.py", "tests/wire/test_peers.py"),
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
    "rl/policy/losses.py": ("tests/rl/policy/test_losses.py",),
    "rl/rollout/advantages.py": ("tests/rl/rollout/test_advantages.py",),
    "rl/policy/delivery.py": ("tests/rl/policy/test_delivery.py",),
    "replay/selection.py": ("tests/replay/test_selection.py",),
    "replay/special.py": ("tests/replay/test_selection.py",),
    "replay/state.py": ("tests/replay/test_state.py", "tests/replay/test_replayer.py"),
}

EQUIVALENT: dict[str, str] = {
    # A piece of the changed line that the unchanged one does not have: why no test can tell them apart.
    "reshape(-2": "NumPy takes every negative length as the one to be computed",
    "least=-2": "-2 is refused either way, by another message",
    "if int(piece.min()) <= 0 or": "a quick look before _refuse, which looks at every value again",
    "if int(piece.min()) < 1 or": "a quick look before _refuse, which looks at every value again",
    "first_bad_set(ids[start:end + 1]": "the row behind is zero, and _refuse looks at the rows themselves again",
    "_refuse(ids[start:end + 1]": "it raises for the first bad row, and that is one of [start, end)",
    "np.flatnonzero(~ids_TLK[1].any(axis=-1))": "there are two rows or more, and all rows are looked at",
    # stitch
    "if needed >= len(self._buffer)": "the buffer grows one element early",
    "self._buffer[:length + 1].copy(), length": "the buffer has room for one element more",
    "np.empty(1, dtype)": "the buffer has room for one element more",
    "np.empty((1, *spec.row_shape)": "the buffer has room for one row more",
    "if room >= len(self._buffer)": "the buffer grows one row early",
    "self._buffer[self._length + 1 : rows] = 0": "what a row that is not captured holds has no meaning",
    "self._buffer[self._length : rows + 1] = 0": "the room behind the rows is not filled yet",
    "3 * len(self._buffer)": "how fast a buffer grows is no promise",
    "5 * len(self._buffer)": "how fast a buffer grows is no promise",
    "if start >= known:": "a gap of no rows is appended, which does nothing",
    "elif start <= known:": "there is no hole behind the last known row to be filled",
    "if a <= end and b > start]": "an empty hole is filled with no rows",
    "if a < end and b >= start]": "an empty hole is filled with no rows",
    "rows >= len(self._buffer):": "what is stored already is stored again as it is",
    "if rows < self._length:": "no rows are missing, so the empty part that is added changes nothing",
    # batch
    "fits = room[: len(bins) + 1]": "a bin that is not open yet has no room",
    ".to(device, non_blocking=False)": "a copy that waits holds the same values",
    "known = (self.all_captured) and (not rows)": "the device is asked, and says the same",
    # measure
    "_equal_sets(b.ids": "equality of sets is symmetric",
    # wire
    "threads: int = 2,": "the bytes and the rows are the same with any number of threads",
    "FREE_STEPS = 2 << 26": "a budget by rule of thumb, checked at the size of attacks",
    "FREE_STEPS = 1 << 27": "a budget by rule of thumb, checked at the size of attacks",
    "STEPS_PER_BYTE = 513": "a budget by rule of thumb, checked at the size of attacks",
    "np.argmax(ids_TLK[start:end + 1].any(": "the first row that is not zero is one of [start, end)",
    "if len(view) <= _FIXED.size + CHECKSUM_BYTES": "72 bytes are refused either way: a header has a layer too",
    "spec.num_layers or 1) >= 1 << 32": "0 and 1 are both below 2**32",
    "if layer_count < 1024": "whether a spec is kept in the cache",
    "if layer_count <= 1025": "whether a spec is kept in the cache",
}
