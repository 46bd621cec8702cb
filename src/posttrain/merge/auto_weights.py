"""Weights of models from their scores and Fisher norms."""

from collections.abc import Sequence

from posttrain.store.errors import UserError


def auto_weights(scores: Sequence[float], norms: Sequence[float]) -> list[float]:
    """Returns w_i = s_i f_i / sum_j s_j f_j.

    f_i, the Fisher norm, is the trace of the diagonal Fisher information: the mean squared norm of the gradient of an
    answer's log-likelihood. The `fisher` method weighs each element of a model by its own information; with one
    precision f_i for the whole model, the isotropic Gaussian of the same trace, its formula (Matena and Raffel 2022,
    arXiv:2111.09832, equation 4) becomes sum_i f_i theta_i / sum_i f_i, the weights here for equal scores. The score is
    the trust in the model's task, as their hyperparameters lambda_i are. Two models at 0.85 and 0.90 whose Fisher
    norms stand 2:3 get 0.85 * 2 : 0.90 * 3 = 1.7 : 2.7, which is 0.386 and 0.614.

    Only ratios count: of scores, where twice as much is twice as good, and of norms, which must be of the same kind of
    answers.

    Args:
        scores: s, one a model, 0 or more.
        norms: f, one a model, 0 or more.

    Raises:
        UserError: there are not as many scores as models, or all products are zero.
    """
    if len(scores) != len(norms):
        raise UserError(f"{len(scores)} scores for {len(norms)} models", where="scores", fix="give one a model")
    products = [score * norm for score, norm in zip(scores, norms, strict=True)]
    total = sum(products)
    if total == 0:
        raise UserError("every score or Fisher norm is zero", where="weights", fix="give the weights as numbers")
    return [product / total for product in products]
