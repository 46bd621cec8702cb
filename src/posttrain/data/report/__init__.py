"""Profiles a dataset version, and measures drift between two; `posttrain.data.report.page` draws both."""

from posttrain.data.report.drift import Drift, measure_drift
from posttrain.data.report.profile import Profile, build_profile

__all__ = ["Drift", "Profile", "build_profile", "measure_drift"]
