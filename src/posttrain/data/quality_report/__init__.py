"""What is in a dataset version, and what changed from one to another; `posttrain.web.data_report` draws both."""

from posttrain.data.quality_report.drift import Drift, drift
from posttrain.data.quality_report.profile import Profile, profile

__all__ = ["Drift", "Profile", "drift", "profile"]
