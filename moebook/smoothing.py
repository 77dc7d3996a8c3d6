"""Smoothing: windows that let experts in gently, and how many experts that costs.

An expert below the k-th largest logit s_(k) enters the window of width eps at u = 0 and
ties with it at u = 1, u = (eps - (s_(k) - s_i)) / eps. A window is a function of u that
rises from 0 to 1. `gating.smooth_top_k` multiplies by it; the extra experts N are those
with 0 < u that are not among the k largest. Lengths eps are in units of the logits.
"""

import math
from collections.abc import Callable
from numbers import Real

import numpy as np
import torch
from scipy import special
from torch import Tensor

from moebook import thresholds

Window = Callable[[Tensor], Tensor]


def log_smoothstep(u: float | Tensor, a: float = 1, b: float = 50) -> Tensor:
    """Log of the smoothstep u^a / (u^a + (1-u)^b), any shape -> the same shape.

    Exactly -inf for u <= 0 and 0 for u >= 1, with gradient zero there and finite
    inside; float64 for a number u. ValueError unless a and b are positive.
    Source: the authors' public code of arXiv:2606.19036 (a = 1, b = 50), without its
    clamp of u at 1e-6, which leaves a jump of that size at u = 0.
    """
    if not (a > 0 and b > 0):
        raise ValueError(
            f"a smoothstep needs exponents a, b > 0, got a={a!r}, b={b!r}: otherwise "
            "it does not rise from 0 to 1"
        )
    u = _numbers(u)
    inside = (u > 0) & (u < 1)
    # Two masks: the logarithms never see an end, so no gradient there is 0 * inf.
    v = torch.where(inside, u, 0.5)
    odds = b * torch.log1p(-v) - a * v.log()
    # softplus would drop the second term beyond 20.
    inner = -torch.logaddexp(odds, torch.zeros_like(odds))
    outer = torch.where(u >= 1, 0.0, torch.where(u <= 0, -torch.inf, u)).detach()
    return torch.where(inside, inner, outer.to(u.dtype))


def cubic_window(u: float | Tensor) -> Tensor:
    """Window 3 u^2 - 2 u^3, flat at both ends, any shape -> the same shape."""
    u = _numbers(u).clamp(0, 1)
    return u * u * (3 - 2 * u)


def optimal_window(u: float | Tensor, k: int) -> Tensor:
    """Window k u / (k + 1 - u), any shape -> the same shape.

    Beside k equal leaders the gate of one extra expert is then u / (k + 1): linear, so
    no window has a smaller largest slope. ValueError unless k >= 1. Source: ours.
    """
    _check_leaders(k)
    u = _numbers(u).clamp(0, 1)
    return k * u / (k + 1 - u)


def window(name: str | Window, k: int = 1) -> Window:
    """The window of a name: "paper" (a=1, b=50), "cubic" or "optimal" beside k leaders.

    A function of your own is handed back, once it is seen to be 0 at 0 and 1 at 1 (the
    rest of [0, 1] is yours: without continuity there the gates jump).
    ValueError for another name, other ends or k < 1. Source: ours but for the first.
    """
    _check_leaders(k)
    if callable(name):
        ends = name(torch.tensor([0.0, 1.0], dtype=torch.float64))
        if ends.tolist() != [0.0, 1.0]:
            raise ValueError(
                "a window must be 0 at u = 0 and 1 at u = 1, or experts jump in or "
                f"out, got {ends.tolist()}"
            )
        return name
    known = {
        "paper": lambda u: log_smoothstep(u).exp(),
        "cubic": cubic_window,
        "optimal": lambda u: optimal_window(u, k),
    }
    if name not in known:
        raise ValueError(
            f"window must be one of {', '.join(known)} or a function of u, got {name!r}"
        )
    return known[name]


def max_slope(name: str | Window, k: int = 1) -> float:
    """Largest slope of a window on (0, 1), the M of the Lipschitz bound.

    Located on a grid of 4001 and then refined: a peak narrower than that can escape.
    Raises as `window`.
    """
    return _steepest(window(name, k))


def lipschitz(name: str | Window, k: int = 1, eps: float = 0.0) -> float:
    """eps times the largest slope of the gate of one extra expert, k equal leaders.

    The gate is q / (k + q), q = e^(-eps (1-u)) window(u); eps = 0 is the limit of a
    thin window. Without unit; 1/(k+1) is the least that a window can do at eps = 0.
    Located as in `max_slope`; raises as `window` and `check_width`. Source: ours.
    """
    sigma, eps = window(name, k), check_width(eps)
    if eps == math.inf:
        raise ValueError("the window must be finite, got eps = inf: it has no slope")

    def gate(u: Tensor) -> Tensor:
        q = torch.exp(-eps * (1 - u)) * sigma(u)
        return q / (k + q)

    return _steepest(gate)


def extra_experts(
    E: int, k: int, eps: float | Tensor, law: str = "normal"
) -> float | Tensor:
    """Expected number E N of extra experts, E independent logits of one law.

    law is "normal" (standard; for standard deviation c ask for eps / c) or "gumbel"
    (standard, closed form). A float for a number eps, float64 of its shape for a
    tensor, and then differentiable: at eps = 0 the gradient is the density of extra
    experts at the threshold. Zero for k = E.
    TypeError or ValueError unless 1 <= k <= E are whole, eps >= 0 and law is known.
    Source: ours. The Gaussian case is a Gauss rule over the law of s_(k).
    """
    logits = thresholds.named(law)
    E, k = thresholds.check_counts(E, k)
    width = thresholds.check_widths(eps)
    if law == "gumbel":
        rivals = torch.arange(E - k + 1, E + 1, device=width.device)
        growth = torch.expm1(width)[..., None]
        found = (E - k) * -torch.expm1(-torch.log1p(growth / rivals).sum(-1))
    else:
        x, weight = (t.to(width.device) for t in thresholds.rule(E, k, logits))
        share = thresholds.share(logits, x, width[..., None])
        found = (E - k) * (weight * share).sum(-1)
    return found if isinstance(eps, Tensor) else found.item()


def extra_law(E: int, k: int, eps: float, law: str = "normal") -> Tensor:
    """Law of the number of extra experts: P(N >= n) for n = 0 .. E - k, (E - k + 1,).

    Float64. Given s_(k) = x, the number N is binomial: each of the E - k others lies
    in the window with chance 1 - G(x - eps)/G(x). Raises as `extra_experts`; one
    number eps. Source: ours.
    """
    logits = thresholds.named(law)
    E, k = thresholds.check_counts(E, k)
    width = thresholds.check_widths(eps)
    if width.ndim:
        raise ValueError(f"eps must be one number, got shape {tuple(width.shape)}")
    x, weight = thresholds.rule(E, k, logits)
    share = thresholds.share(logits, x, width.detach().cpu())[:, None].numpy()
    n = np.arange(1, E - k + 1)
    tails = weight.numpy() @ special.betainc(n, E - k - n + 1, share)
    return torch.from_numpy(np.concatenate(([1.0], tails)))


def budget_eps(E: int, k: int, budget: float = 0.5, law: str = "normal") -> float:
    """The width eps at which `extra_experts` is the budget.

    ValueError unless 0 < budget < E - k; raises else as `extra_experts`.
    """
    E, k = thresholds.check_counts(E, k)
    if not 0 < budget < E - k:
        raise ValueError(
            f"the budget must lie between 0 and E - k = {E - k} extra experts, got "
            f"{budget!r}"
        )
    from scipy.optimize import brentq  # here alone: gates need not load it

    def missing(eps: float) -> float:
        return extra_experts(E, k, eps, law) - budget

    high = 1.0
    while missing(high) < 0:
        high *= 2
    return brentq(missing, 0.0, high, xtol=1e-300)


def boundary_loss(
    active: Tensor, eps: Tensor, k: int, budget: float = 0.5, alpha: float = 1.0
) -> Tensor:
    """Loss alpha eps (X - k - budget), X the mean of the active experts (n,) -> ().

    active counts every gate that is not zero, the k leaders included, and is held
    fixed: the gradient in eps is alpha (X - k - budget), so that descent is a search
    for the width at which X = k + budget. ValueError for no token or a table.
    Source: the boundary loss in the authors' public code of arXiv:2606.19036.
    """
    if active.ndim != 1 or len(active) == 0:
        raise ValueError(
            "active must have shape (n,), n >= 1, the active experts of each token, "
            f"got {tuple(active.shape)}: count them by (gates > 0).sum(1)"
        )
    excess = active.detach().double().mean() - (k + budget)
    return alpha * eps * excess.to(torch.as_tensor(eps).dtype)


def check_width(eps: float | Tensor) -> float:
    """The width of a window as a float, if it is one number eps >= 0; inf is one.

    TypeError for anything but a real number or a tensor without dimensions,
    ValueError for NaN or a negative number.
    """
    scalar = isinstance(eps, Tensor) and eps.ndim == 0 and not eps.is_complex()
    if not scalar and (isinstance(eps, bool) or not isinstance(eps, Real)):
        came = f"shape {tuple(eps.shape)}" if isinstance(eps, Tensor) else repr(eps)
        raise TypeError(
            f"the width eps must be one real number, got {came} of type "
            f"{type(eps).__name__}: call once for each width"
        )
    return thresholds.check_widths(eps).item()


def _steepest(function: Window) -> float:
    """Largest derivative on [0, 1], its limits at the ends included."""

    def slope(u: Tensor) -> Tensor:
        with torch.enable_grad():
            u = u.requires_grad_()
            return torch.autograd.grad(function(u).sum(), u)[0].detach()

    low, high = 2.0**-53, 1 - 2.0**-53
    for _ in range(3):
        grid = torch.linspace(low, high, 4001, dtype=torch.float64)
        values = slope(grid)
        best = int(values.argmax())
        low, high = (grid[m].item() for m in (max(best - 1, 0), min(best + 1, 4000)))
    return values[best].item()


def _numbers(u: float | Tensor) -> Tensor:
    if isinstance(u, Tensor) and u.is_floating_point():
        return u
    return torch.as_tensor(u, dtype=torch.float64)


def _check_leaders(k: int) -> None:
    if isinstance(k, bool) or not isinstance(k, Real) or not 1 <= k < math.inf:
        raise ValueError(f"k, the number of leaders, must be at least 1, got {k!r}")
