"""Records that a model finds hard: those that evaluation found, what lies near them, and adversarial ones."""
