"""The engine that maps on a Ray cluster."""

import logging
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from posttrain.jobs.base import Engine, Item, Result
from posttrain.store.errors import UserError, WorkError
from posttrain.store.installation import install_command

_BLOCK_SIZE = 256  # items handed over at a time, so that an endless iterable is not drained


class RayEngine(Engine):
    """Runs items as rows of a Ray dataset; files that they name must be visible to every node.

    Joins the cluster that ``RAY_ADDRESS`` names, or starts one on this machine.
    """

    def __init__(self, workers: int) -> None:
        super().__init__()
        try:
            import ray
            import ray.data
        except ImportError:
            raise UserError("Ray is not installed", where="--engine", fix=install_command("ray[data]")) from None
        self.workers = workers
        self._ray: Any = ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
            local: dict[str, Any] = {"num_cpus": workers, "include_dashboard": False}
            if os.environ.get("RAY_ADDRESS"):
                local = {}  # Ray refuses a number of processors for a cluster that runs already
            ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=True, **local)
            self.callback(ray.shutdown)
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True  # else rows come as they finish, and results differ by run
        logging.getLogger("ray.data").setLevel(logging.ERROR)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        call = _Call(function)
        rest = iter(items)
        while block := list(islice(rest, _BLOCK_SIZE)):
            # As bytes: Ray would turn items into Arrow columns, and fail for types that Arrow does not have.
            rows = [{"item": pickle.dumps(item)} for item in block]
            data = self._ray.data.from_items(rows, override_num_blocks=len(rows))
            try:
                for row in data.map(call).iter_rows():
                    result, error = pickle.loads(row["result"])  # noqa: S301  # what our own worker has just sent
                    if error is not None:
                        raise error
                    yield result
            except self._ray.exceptions.RayError as error:
                raise WorkError(f"a Ray worker failed: {str(error).splitlines()[0]}") from None


class _Call:
    """Calls the function on pickled items, and returns an exception as a value: Ray would wrap it in its own type."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result: tuple[Any, Exception | None] = (self.function(pickle.loads(row["item"])), None)  # noqa: S301  # what our own process has sent
        except Exception as error:  # noqa: BLE001  # raised again where the result is read
            result = (None, error)
        return {"result": pickle.dumps(result)}
