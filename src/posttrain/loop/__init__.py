"""Rounds, stages, gate, triggers and the registry of models; knows no algorithm.

`loop.py` decides whether a round starts; `round.py` walks its steps; `stage.py` has their base classes, `context.py`
what they share, `state.py` the frozen result so far. A stage's seed derives from the config's seed, the round and the
stage; stages without a random choice have none, so that rounds share their work. A refused round's labels are carried
on, unless its model was surely worse. `watch.py` runs the loop again whenever something that it waits for has changed.

A batch that waits for labels is exported, read and answered outside of its round (`open_batch.py`).
`model_registry.py` brings link, split and hook in line with the registry at each start. A canary (`canary.py`) is
judged before any round, by its outcomes in the order of their arrival. The random baseline runs the same loop as an
arm of the workspace: artifacts and finished runs are shared; rounds, deployments and the champion's link are its own.
"""
