"""What holds for all tests: how many examples hypothesis draws (HYPOTHESIS_PROFILE=thorough draws more), and Ctrl-C."""

from __future__ import annotations

import os
import signal

import hypothesis

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell lets the commands that it starts in the background ignore Ctrl-C, and the commands of these tests would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
