"""What each training record is worth by gradients: influence functions, TracIn, TRAK and LESS.

Throughout, a score is positive where training on the record helps: it lowers the test record's loss.
"""
