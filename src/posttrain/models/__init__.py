"""Everything about models that several stages share: load, save, render, score, generate, embed.

`loading.py` reads every config, tokenizer and model: once `weight_files.py` has checked the headers, each tensor must
be used, have the config's shape and be finite. `template_check.py` renders a chat template first in a process with
limits.

`chat.py` renders a conversation once for training, scoring and serving. A step's units are packed into rows without
padding (`packing.py`); attention is confined to each sequence by a registered attention function (`attention.py`,
planned in `attention_plan.py`), and a model that cannot be confined, which a probe detects, gets padded rows. The
output head (`head.py`) runs only where a token is supervised, a part of the vocabulary at a time. `fused.py` and
`fused_lora.py` take fewer passes over memory where a probe finds them equal to the model's own layers.

`label_tree.py` scores a closed label set as a tree in one row: the prompt is read once, and branches that cannot
matter are bounded. `ensembles/` answers with several models: pooling, a gate, a cascade. `endpoint.py` is the client
of model servers; every reply is on the disk before it is used.
"""
