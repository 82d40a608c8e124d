"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# A busy machine is slow now and then: how long an example takes says nothing of what it tests.
settings.register_profile("twinphase", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("twinphase")
