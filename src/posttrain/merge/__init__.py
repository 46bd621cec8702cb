"""One model out of several, by a recipe, streamed tensor by tensor.

`recipe.py` says what to merge, `plan.py` which tensors of which models make each tensor of the result, and `engine.py`
runs the plan in processes. A process merges one tensor at a time: `tensor_group.py` has it of every model in blocks of
rows that fit a core's cache, a method (`methods/`) returns the function of one block and computes in float32, and
`shard_writer.py` puts the bytes where the header says. Blocks depend only on the shape, sums go in the order of
blocks, and random numbers on the seed, the tensor's name, the model and the block: so nothing of the machine changes a
bit.

A source gives ranges of a tensor: of safetensors files, with a LoRA adapter added as it is read, in another
vocabulary's order, or in another model's order of hidden units (`alignment.py`). Statistics of a model on data (Fisher
information, Gram matrices) are computed before the run, cached, and read as one more source. `conflicts.py` measures
task vectors; `recommendation.py` says what follows from them. `posttrain.tune.merges` searches and measures merges on
records.
"""

from posttrain.store.extensions import lazy_exports

__getattr__ = lazy_exports(
    __name__, {"merge": "api", "Recipe": "recipe", "merge_method": "methods.base", "TensorGroup": "tensor_group"}
)
