"""Searches the settings of trainings: held-out records, trials that train and measure, supernets."""
