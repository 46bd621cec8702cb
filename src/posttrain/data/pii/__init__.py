"""Personal data in texts: detectors by kind, and check digits."""
