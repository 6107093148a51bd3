"""The small model and the settings of tests/rl."""

from tests.rl.conftest import make_config, one_thread, problems, random_model, settings

__all__ = ["make_config", "one_thread", "problems", "random_model", "settings"]
