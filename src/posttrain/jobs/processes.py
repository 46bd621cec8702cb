"""Work in processes of this machine."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from typing import Any

from posttrain.jobs.engine import Engine, Item, Result
from posttrain.store.errors import WorkError

_AHEAD = 2  # items waiting for each worker, so that none is idle and few lie in memory


class Processes(Engine):
    """Fresh processes, not forks: threads of this one's libraries do not survive a fork.

    They are joblib's, which do not run the user's script again, as those of `multiprocessing` would.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        from joblib.externals.loky import ProcessPoolExecutor

        self._pool: Any = ProcessPoolExecutor(workers)

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        rest = iter(items)
        first = list(islice(rest, 2))
        if len(first) < 2:  # a process takes longer to start than most items take
            yield from map(function, first)
            return
        waiting: deque[Future[Result]] = deque()
        try:
            for item in chain(first, rest):
                waiting.append(self._pool.submit(function, item))
                if len(waiting) >= self.workers * _AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise WorkError("a worker process ended before its work; the same command goes on from here") from None
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        self._pool.shutdown(kill_workers=True)
