"""Gating: from logits to gates, the weights with which experts speak.

Gates have the shape and the dtype of the logits, (n, K). Those of `softmax`, `hard`
and `top_k` are not negative and sum to one in each row; those of `relu` need not.
Logits and the temperature tau have one unit; only their ratio matters.
"""

from numbers import Real

import torch
from torch import Tensor

from moebook.routing import active_set, check_logits


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


def _margins(logits: Tensor) -> Tensor:
    # Gates depend on differences only, so the maximum is a constant: detached, no
    # gradient is split among ties. The clamp keeps -inf / inf out of the softmax.
    top = logits.detach().amax(dim=1, keepdim=True)
    return (logits - top).clamp(min=torch.finfo(logits.dtype).min)
