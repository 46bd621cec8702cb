"""Measures models on suites, and says with which certainty two of them differ.

`suite.py` reads a suite and runs its scorer (`scorers/`) record by record; `bootstrap.py` has the paired intervals of
the gate, `sequential.py` the test of a canary whose outcomes arrive one by one, `retention.py` what a model kept of
its base, `latency.py` seconds per answer: the least of its repeats, and every label scored, so that a less sure model
is not slower.
"""
