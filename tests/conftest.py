"""Settings shared by all tests."""

import os

from hypothesis import settings

# Machines that run tests are shared and slow at times: an example may take as long as it takes (pytest's own timeout
# catches a hang). In CI the examples are always the same, so that a red run is about the change under test.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "local"))
