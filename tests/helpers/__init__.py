"""Hold what tests share: small configurations, environments made to be learned or to fail, and slow references."""

import pytest

pytest.register_assert_rewrite("helpers.lanes", "helpers.support", "helpers.worlds")
