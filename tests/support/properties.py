"""Property-based tests: how many examples hypothesis draws.

=========  =========================================================================================
suite      the same examples in every run, so that a failure is one of the change; the default
search     others in each run, and many: ``make check-properties``
=========  =========================================================================================

An example that has failed once stays beside its test, as ``@example`` or as a test of its own.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# a busy machine is no failure; pytest-timeout ends what hangs
_PATIENT = settings(
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
settings.register_profile(
    "suite", _PATIENT, derandomize=True, max_examples=60, stateful_step_count=30
)
settings.register_profile("search", _PATIENT, max_examples=2_000, stateful_step_count=60)
settings.load_profile("suite")
