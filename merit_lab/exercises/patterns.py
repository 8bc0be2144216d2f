"""Notebook 07: how alike the weights of a row are, against chance."""

import torch

from ..probes import shuffled, similarity
from .judge import Mistake, judge


def right(w):
    """merit_lab.probes.similarity."""
    return similarity(w)


def _share(x):
    k = x.shape[1]
    return (k * (x.mean(dim=1) - x.mean()).square().sum() / (x - x.mean()).square().sum()).item()


def _corrected(share, n, k):
    chance = (n - 1) / (n * k - 1)
    return (share - chance) / (1 - chance)


def _no_centring(w):
    x = w.abs()
    return (x.shape[1] * x.mean(dim=1).square().sum() / x.square().sum()).item()


def _no_centring_corrected(w):
    return _corrected(_no_centring(w), *w.shape)


def _signs_kept(w):
    return _corrected(_share(w), *w.shape)


def _exchanged(w):
    return similarity(w.T)


def _no_chance(w):
    return _share(w.abs())


def _chance_only_subtracted(w):
    n, k = w.shape
    return _share(w.abs()) - (n - 1) / (n * k - 1)


MISTAKES = {
    "no centring": Mistake(
        _no_centring, "nothing is centred: take the mean of all |w| away first, else any positive matrix scores high"
    ),
    "no centring, corrected": Mistake(
        _no_centring_corrected, "the mean of all |w| must be taken away before squaring, in both sums"
    ),
    "signs kept": Mistake(
        _signs_kept, "the signs are still there: a row of large weights of both signs averages to nothing; take |w|"
    ),
    "rows and columns exchanged": Mistake(
        _exchanged, "this is the similarity within columns: mean(dim=1) is one mean a row, mean(dim=0) one a column"
    ),
    "chance left in": Mistake(
        _no_chance, "a shuffled matrix does not score 0: take away what chance gives, (n - 1) / (n k - 1)"
    ),
    "not scaled to 1": Mistake(
        _chance_only_subtracted, "constant rows do not score 1: after taking chance away, divide by 1 - chance"
    ),
}

_generator = torch.Generator().manual_seed(0)
_NOISE = torch.randn(6, 9, generator=_generator, dtype=torch.float64)
_STRIPES = _NOISE * torch.tensor([1.0, 4, 1, 2, 8, 1], dtype=torch.float64)[:, None]
INPUTS = [{"w": w} for w in (_STRIPES, shuffled(_STRIPES), _STRIPES.T.contiguous(), _NOISE.abs() + 1)]


def verdict(answer) -> str:
    """What is wrong with the answer, if anything."""
    return judge(answer, right, INPUTS, MISTAKES.values())


def check_similarity(answer) -> None:
    """Print the verdict on a function (w) -> similarity within rows."""
    print(verdict(answer))
