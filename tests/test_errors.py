"""Errors cross a process whole, and their messages stay short."""

from __future__ import annotations

import pickle

import pytest

from router_replay import errors
from router_replay.errors import RouterReplayError, shorten

ERRORS = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RouterReplayError)]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_crosses_a_process_whole(error: type[RouterReplayError]) -> None:
    back = pickle.loads(pickle.dumps(error("row 3, layer 1")))
    assert (type(back), str(back)) == (error, "row 3, layer 1")


def test_many_names_in_a_message_are_shortened() -> None:
    assert shorten("abcde") == "a, b, c, d, e"
    assert shorten("abcdef") == "a, b, c, d, e, ... 6 in all"
    assert shorten(range(9), 8) == "0, 1, 2, 3, 4, 5, 6, 7, ... 9 in all"
    assert shorten([]) == ""
