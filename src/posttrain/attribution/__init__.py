"""The value of training records by Shapley values and data-OOB, and their influence on answers by EK-FAC.

Work goes through blocks (`blocks.py`): random numbers depend on the number of the permutation, so that processes
change no digit, and finished blocks lie on disk, so that none runs twice.
"""
