"""Finds near and semantic duplicates, and training records that overlap with evaluation records.

`ngrams` hashes texts, `minhash` and `overlap_sketch` sketch them, and `hash_index` finds the records that hold a hash.
Two searches stand on these: `near_duplicates` among all records, and `evaluation_index` between training and evaluation
records. Both propose pairs by hashes and verify each pair on the texts.
"""
