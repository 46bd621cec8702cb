"""Merging: one model out of several, by a recipe, streamed tensor by tensor."""

from posttrain.store.extensions import lazy_exports

__getattr__ = lazy_exports(
    __name__, {"merge": "api", "Recipe": "recipe", "merge_method": "methods.base", "TensorGroup": "tensor_group"}
)
