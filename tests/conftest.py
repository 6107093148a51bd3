"""How many examples hypothesis draws; HYPOTHESIS_PROFILE=thorough draws more."""

from __future__ import annotations

import os

import hypothesis

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
