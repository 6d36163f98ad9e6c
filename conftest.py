"""What all tests share: how hypothesis judges a busy machine, which is not at all."""

from hypothesis import HealthCheck, settings

settings.register_profile("kvpool", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvpool")
