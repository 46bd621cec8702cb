"""Labels and who gives them: the queue, people, models, files, and the quality of their answers.

`queue.py` has the operations on items, batches and leases. A batch keeps the settings and the seed that it was added
under; hashes of them draw what is checked, gold or planted, and no request tells an annotator which. `queue_review.py`
decides an item by its answers alone, so that an undo decides it again. A batch closes when the loop takes it up. On
PostgreSQL an item's row is locked while it is given out, and leases are checked again under the lock.

`model_annotators.py` lets a model answer; `acceptance.py` chooses the threshold above which its answers need no
people, by an exact test on held-out answers. `quality/` reads one table of answers: agreement, consensus (Dawid and
Skene), annotators, findings with a control group. `formats/` reads and writes the files of other tools. `accounts.py`,
`tokens.py` and `audit.py` know people and secrets, and nothing of HTTP.
"""
