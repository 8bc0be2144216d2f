"""AdamW, LAMB and MERIT in plain Python floats: loops over elements, no tensors, no shared code.

Written from the papers' equations to hold the step functions against. A weight is a dict from index tuples to
floats, as `elements` makes it, so that "the row of element (i, j)" is said in so many words. Each function takes a
weight and its gradients, one a step, and returns the weight after each step.
"""

from math import inf, sqrt


def elements(tensor):
    """A tensor of any shape as a dict: index tuple -> float."""

    def walk(value, index):
        if isinstance(value, list):
            for i, part in enumerate(value):
                yield from walk(part, (*index, i))
        else:
            yield index, value

    return dict(walk(tensor.tolist(), ()))


def adamw(w, grads, *, lr, betas, eps, weight_decay):
    after = []
    for d in adam_directions(w, grads, betas, eps, corrected=True):
        w = {i: w[i] - lr * weight_decay * w[i] - lr * d[i] for i in w}
        after.append(w)
    return after


def lamb(w, grads, *, lr, betas, eps, weight_decay, corrected=True, max_weight_norm=inf):
    after = []
    for d in adam_directions(w, grads, betas, eps, corrected):
        u = {i: d[i] + weight_decay * w[i] for i in w}
        weight_norm, direction_norm = min(length(w.values()), max_weight_norm), length(u.values())
        ratio = weight_norm / direction_norm if weight_norm and direction_norm else 1.0
        w = {i: w[i] - lr * ratio * u[i] for i in w}
        after.append(w)
    return after


def merit(
    w, grads, *, lr, betas, eps, weight_decay, variant="official", norm="max", ratio="element", bound=True, clip=True
):
    after = []
    for d in adam_directions(w, grads, betas, eps, corrected=False):
        u = {i: d[i] + weight_decay * w[i] for i in w}
        s = merit_factors(w, u, variant, {"max": largest, "l2": length}[norm], ratio, bound)
        delta = {i: s[i] * u[i] for i in w}
        if clip:
            delta = {i: min(max(x, -1.0), 1.0) for i, x in delta.items()}
        w = {i: w[i] - lr * delta[i] for i in w}
        after.append(w)
    return after


def merit_factors(w, u, variant, size, ratio, bound):
    """The factor s of every element."""
    factors = {}
    for index in w:
        if len(index) < 2:
            groups = [list(w)]
        else:
            row, column = row_and_column(w, index, variant)
            groups = {"element": [row, column], "row": [row], "column": [column], "weight": [list(w)]}[ratio]
        sizes = [(size(w[i] for i in group), size(u[i] for i in group)) for group in groups]
        whole = size(w.values()), size(u.values())
        if variant == "official" or len(index) < 2:
            guarded = any(top == 0 or bottom == 0 for top, bottom in sizes)
            candidates = [*sizes, whole] if bound else sizes
            factors[index] = 1.0 if guarded else max(top / bottom for top, bottom in candidates)
        else:  # a ratio with a zero denominator is left out of the maximum
            candidates = [*sizes, whole] if bound else sizes
            factors[index] = max((top / bottom for top, bottom in candidates if bottom), default=0.0)
    return factors


def row_and_column(w, index, variant):
    """The indices of the row and the column that an element stands in."""
    i, j, *rest = index
    column = [k for k in w if k[1] == j and list(k[2:]) == rest]  # every i
    if variant == "official":
        row = [k for k in w if k[0] == i and list(k[2:]) == rest]  # every j
    else:
        row = [k for k in w if k[0] == i]  # every j of the weight flattened to (n, everything else)
    return row, column


def adam_directions(w, grads, betas, eps, corrected):
    """m / (√v + ε) after each gradient, of the bias-corrected moments or the plain ones."""
    beta1, beta2 = betas
    m, v = dict.fromkeys(w, 0.0), dict.fromkeys(w, 0.0)
    for t, g in enumerate(grads, start=1):
        m = {i: beta1 * m[i] + (1 - beta1) * g[i] for i in w}
        v = {i: beta2 * v[i] + (1 - beta2) * g[i] ** 2 for i in w}
        a, b = (1 - beta1**t, 1 - beta2**t) if corrected else (1.0, 1.0)
        yield {i: (m[i] / a) / (sqrt(v[i] / b) + eps) if v[i] or eps else 0.0 for i in w}


def largest(values):
    return max(abs(x) for x in values)


def length(values):
    return sqrt(sum(x * x for x in values))
