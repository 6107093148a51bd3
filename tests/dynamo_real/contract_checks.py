"""The contract of every engine, on a real Dynamo, by each of its two routes; run by `make test-dynamo`.

The tests are those of tests/engines/test_contract.py. Named so that only an explicit path collects them.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.engines.test_contract")

from tests.engines import test_contract  # noqa: E402

globals().update({name: value for name, value in vars(test_contract).items() if name.startswith("test_")})
