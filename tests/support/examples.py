"""How many examples properties are tried on."""

import os

from hypothesis import HealthCheck, settings


def few(count: int, **more) -> settings:
    """Settings of properties whose examples are whole runs: `count` of them, times the environment's TEST_DEPTH."""
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count * int(os.environ.get("TEST_DEPTH", "1")), suppress_health_check=checks, **more)
