"""Registry of merge methods. Other packages add a `MergeMethod` as an entry point of ``posttrain.merge_methods``."""

from posttrain.merge.methods.base import MergeMethod
from posttrain.store.errors import UserError, suggest
from posttrain.store.extensions import Registry

_HERE = "posttrain.merge.methods"

METHODS: Registry[MergeMethod] = Registry(
    "merge method",
    "posttrain.merge_methods",
    {
        "linear": f"{_HERE}.linear:linear",
        "task_arithmetic": f"{_HERE}.linear:task_arithmetic",
        "passthrough": f"{_HERE}.linear:passthrough",
        "slerp": f"{_HERE}.slerp:slerp",
        "nuslerp": f"{_HERE}.slerp:nuslerp",
        "ties": f"{_HERE}.ties:ties",
        "dare_linear": f"{_HERE}.dare:dare_linear",
        "dare_ties": f"{_HERE}.dare:dare_ties",
        "della": f"{_HERE}.della:della",
        "della_linear": f"{_HERE}.della:della_linear",
        "fisher": f"{_HERE}.fisher:fisher",
        "regmean": f"{_HERE}.regmean:regmean",
        "by_importance": f"{_HERE}.by_importance:by_importance",
        "resolve_conflicts": f"{_HERE}.sign_conflicts:resolve_conflicts",
        "extract_lora": f"{_HERE}.adapters:extract_lora",
        "concatenate_lora": f"{_HERE}.adapters:concatenate_lora",
        "mixture_of_experts": f"{_HERE}.mixture_of_experts:mixture_of_experts",
    },
    base=MergeMethod,
)


def load_method(name: str, where: str = "method") -> MergeMethod:
    """Returns a method by its name.

    Raises:
        UserError: there is none of this name.
    """
    if name not in METHODS:
        raise UserError(f"there is no merge method `{name}`", where=where, fix=suggest(name, METHODS))
    return METHODS.load(name, where)
