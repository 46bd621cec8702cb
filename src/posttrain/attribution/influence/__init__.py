"""Influence of training records by gradients: influence functions, TracIn, TRAK and LESS.

Throughout, a score is positive where training on the record helps: it lowers the test record's loss.
"""
