"""Texts as vectors without any model: hashed n-grams, weighed and brought down to a few hundred numbers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

_COLUMNS = 1 << 18
_WIDTH = 256


def counts(texts: Sequence[str]) -> Any:
    """Sparse float64 [N, 2^18]: character n-grams of 2 to 5 within words, each in a column by its hash."""
    from sklearn.feature_extraction.text import HashingVectorizer

    vectoriser = HashingVectorizer(
        analyzer="char_wb", ngram_range=(2, 5), n_features=_COLUMNS, alternate_sign=False, norm=None
    )
    return vectoriser.transform(texts).tocsr()


def reduced(rows: Any, seed: int = 0) -> npt.NDArray[np.float64]:
    """Latent semantic analysis of `counts`, float64 [N, at most 256], rows of length one (Deerwester et al. 1990).

    TF-IDF with the logarithm of counts, then the leading singular vectors by a seeded randomised method.
    """
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfTransformer
    from sklearn.preprocessing import normalize
    from threadpoolctl import threadpool_limits

    used = np.flatnonzero(np.bincount(rows.indices, minlength=rows.shape[1]))
    weighed = TfidfTransformer(sublinear_tf=True).fit_transform(rows[:, used])
    with threadpool_limits(1):
        width = max(1, min(_WIDTH, weighed.shape[0] - 1))
        return np.asarray(normalize(TruncatedSVD(width, random_state=seed).fit_transform(weighed)), dtype=np.float64)
