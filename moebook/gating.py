"""Gating: from logits to gates, the weights with which experts speak.

Gates have the shape and the dtype of the logits, (n, K). Those of `softmax`, `hard`,
`top_k` and `smooth_top_k` are not negative and sum to one in each row; those of `relu`
need not.
Logits and the temperature tau have one unit; only their ratio matters.
"""

from numbers import Real

import torch
from torch import Tensor

from moebook import smoothing
from moebook.routing import active_set, check_active, check_logits


def softmax(logits: Tensor, tau: float | Tensor) -> Tensor:
    """Soft gates exp(z / tau) / sum exp(z / tau), (n, K) -> (n, K).

    tau >= 0 is a number or a tensor without dimensions; gradients flow to the logits
    and to such a tensor. tau = inf shares equally. tau = 0 shares equally among the
    experts that tie exactly at the maximum: the limit as tau falls to zero, ties
    included. It is piecewise constant and carries no gradient.
    Raises as `check_logits` and `check_temperature`.
    """
    check_logits(logits)
    value = check_temperature(tau)
    if value == 0.0:
        tied = logits == logits.amax(dim=1, keepdim=True)
        return tied.to(logits.dtype) / tied.sum(dim=1, keepdim=True)
    margins = _margins(logits)
    if value < torch.finfo(logits.dtype).tiny:
        # tau itself would round to zero in this dtype, and 0/0 is NaN.
        margins = margins.double()
    # A tensor, since a scalar divisor is inverted on some devices, and 1/tau may be
    # infinite where 0/tau is zero.
    tau = torch.as_tensor(tau, dtype=margins.dtype, device=margins.device)
    return torch.softmax(margins / tau, dim=1).to(logits.dtype)


def hard(logits: Tensor) -> Tensor:
    """One-hot gates of the largest logit, (n, K) -> (n, K).

    A decision: at a tie the expert of lowest index takes all, as in
    `routing.active_set`, whereas `softmax` at tau = 0 shares. Off ties the two are
    equal. Piecewise constant, without gradient. Raises as `check_logits`.
    """
    return active_set(logits, 1).to(logits.dtype)


def top_k(logits: Tensor, k: int) -> Tensor:
    """Softmax at tau = 1 over the k active experts, zero elsewhere, (n, K) -> (n, K).

    k = K is the softmax, k = 1 is `hard`. Discontinuous where `routing.gap(logits, k)`
    vanishes; ties across the k-th place go to the lowest index. Gradients flow to the
    kept logits, and know nothing of the jump.
    Raises as `routing.check_logits` and `routing.check_active`.
    Source: Shazeer et al. (2017), eqs. 3 and 5, without their noise.
    """
    active = active_set(logits, k)
    return torch.softmax(_margins(logits).masked_fill(~active, -torch.inf), dim=1)


def smooth_top_k(
    logits: Tensor,
    k: int,
    eps: float | Tensor,
    window: str | smoothing.Window = "cubic",
) -> Tensor:
    """Softmax gates with a window of width eps below the k-th logit, (n, K) -> (n, K).

    Gates are e^(z_i) sigma(u_i) over their sum, u_i = (eps - (z_(k) - z_i)) / eps. The
    k largest have u >= 1 and sigma(1) = 1; an expert at eps or more below z_(k) has
    gate zero; in between the window sigma lets it in, so the gates are continuous at
    ties of every order. There is no cap on the number of active experts.

    The width eps >= 0, in units of the logits, is a number or a tensor without
    dimensions. eps = 0 is `top_k`, ties decided and not shared; eps = inf is the
    softmax. Gradients flow to the logits, z_(k) and u included, and to such a tensor.
    window: a name of `smoothing.window`, or sigma itself on [0, 1].
    Raises as `check_logits`, `check_active`, `smoothing.check_width` and
    `smoothing.window`. Half precision is computed in float32.
    Source: SmoothSMoE, arXiv:2606.19036; its public code holds u fixed in the gradient,
    which is then not that of the gates.
    """
    check_logits(logits)
    k, width = check_active(logits, k), smoothing.check_width(eps)
    sigma = smoothing.window(window, k)
    if width == 0.0:
        return top_k(logits, k)
    if width == float("inf"):
        return softmax(logits, 1.0)
    z = logits.float() if logits.element_size() < 4 else logits
    if width < torch.finfo(z.dtype).tiny or width > torch.finfo(z.dtype).max:
        z = z.double()
    eps = torch.as_tensor(eps, dtype=z.dtype, device=z.device)
    below = _kth_largest(z, k) - z
    # eps - below is exact at entry, where 1 - below / eps rounds. A leader's u is one,
    # whatever the window's slope there.
    u = torch.where(below > 0, (eps - below) / eps, 1.0).clamp(min=0)
    weights = _margins(z).exp() * sigma(u)
    return (weights / weights.sum(dim=1, keepdim=True)).to(logits.dtype)


def relu(logits: Tensor) -> Tensor:
    """Gates max(z, 0), (n, K) -> (n, K).

    In units of the logits, not normalised: the number of active experts varies, and
    may be none. Continuous with a kink at z = 0. Raises as `check_logits`.
    Source: ReMoE, arXiv:2412.14711.
    """
    check_logits(logits)
    return logits.relu()


def check_temperature(tau: float | Tensor) -> float:
    """The temperature as a float, if it is a number tau >= 0; inf is one.

    TypeError for anything but a real number or a real tensor without dimensions,
    ValueError for NaN or a negative number.
    """
    scalar = isinstance(tau, Tensor) and tau.ndim == 0 and not tau.is_complex()
    if not scalar and (isinstance(tau, bool) or not isinstance(tau, Real)):
        came = f"shape {tuple(tau.shape)}" if isinstance(tau, Tensor) else repr(tau)
        raise TypeError(
            "the temperature tau must be one real number, got "
            f"{came} of type {type(tau).__name__}: call once for each temperature"
        )
    value = float(tau.detach()) if isinstance(tau, Tensor) else float(tau)
    if not value >= 0.0:
        raise ValueError(
            f"the temperature tau must be a number >= 0, got {value}: use 0 for hard "
            "routing and float('inf') for equal gates"
        )
    return value


def _kth_largest(logits: Tensor, k: int) -> Tensor:
    """The k-th largest logit, (n, K) -> (n, 1); its gradient goes to one expert."""
    if k > 4:
        return logits.topk(k, dim=1).values[:, -1:]
    rest = logits.detach().clone()
    for _ in range(k - 1):  # several times faster than topk for few leaders
        rest.scatter_(1, rest.argmax(dim=1, keepdim=True), -torch.inf)
    return logits.gather(1, rest.argmax(dim=1, keepdim=True))


def _margins(logits: Tensor) -> Tensor:
    # Gates depend on differences only, so the maximum is a constant: detached, no
    # gradient is split among ties. The clamp keeps -inf / inf out of the softmax.
    top = logits.detach().amax(dim=1, keepdim=True)
    return (logits - top).clamp(min=torch.finfo(logits.dtype).min)
