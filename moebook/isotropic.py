"""Isotropic modules: the risks of feature noise in two numbers, K and nu.

Every module has covariance s^2 I and probability 1/K, all |beta_k|^2 = B; nu = sigma^2
/ s^2. Risks are in units of s^2 B, above the label noise: the predictor 0 has risk 1.
Noise is there when the predictor is fitted and when it is used. Functions take floats
or tensors, which broadcast, and return float64; they are differentiable. Each raises
TypeError for what is no number, ValueError for NaN, inf, K < 1, nu < 0 or a
share outside its range.
"""

from typing import Literal

import torch
from torch import Tensor

from moebook.modular import Numbers, modules, nonnegative, share


def isotropic_dense(K: Numbers, nu: Numbers) -> Tensor:
    """Risk K nu / (1 + K nu) of the best linear predictor, broadcast.

    Source: arXiv:2601.14792, Theorem 4.2, at equal isotropic modules.
    """
    K, nu = modules(K), nonnegative("nu", nu)
    return K * nu / (1 + K * nu)


def isotropic_sparse(nu: Numbers) -> Tensor:
    """Risk nu / (1 + nu) of the best experts, told the module, for any K.

    Source: arXiv:2601.14792, Theorem 4.2, at isotropic modules.
    """
    nu = nonnegative("nu", nu)
    return nu / (1 + nu)


def isotropic_gap(K: Numbers, nu: Numbers) -> Tensor:
    """Dense less sparse risk, (K - 1) nu / ((1 + nu) (1 + K nu)), broadcast.

    Source: ours, from arXiv:2601.14792, Theorem 4.2.
    """
    K, nu = modules(K), nonnegative("nu", nu)
    return (K - 1) * nu / ((1 + nu) * (1 + K * nu))


def gap_peak(K: Numbers) -> tuple[Tensor, Tensor]:
    """Place nu = 1 / sqrt(K) and height (sqrt K - 1) / (sqrt K + 1) of the gap's peak.

    Source: ours; the gap is a bell, symmetric in log nu.
    """
    side = modules(K).sqrt()
    return 1 / side, (side - 1) / (side + 1)


def isotropic_sensitivities(K: Numbers, nu: Numbers) -> tuple[Tensor, Tensor]:
    """Rise of the dense and the sparse risk for each unit of extra test noise.

    K / (1 + K nu)^2 and 1 / (1 + nu)^2; the unit is a variance of s^2. They cross at
    nu = 1 / sqrt(K), above which the dense predictor is the less sensitive one.
    Source: ours; they are the derivatives of the risks by nu.
    """
    K, nu = modules(K), nonnegative("nu", nu)
    return K / (1 + K * nu) ** 2, (1 / (1 + nu) ** 2).expand_as(K * nu)


def extra_noise_breakeven(K: Numbers, nu: Numbers) -> Tensor:
    """Extra test noise variance over s^2 from which dense beats sparse, broadcast.

    nu (1 + nu) (1 + K nu) / (K nu^2 - 1) with perfect routing, inf up to nu = 1 /
    sqrt(K), and inf for K = 1, where both are the same. Source: ours.
    """
    K, nu = modules(K), nonnegative("nu", nu)
    excess = torch.where(K > 1, K * nu**2 - 1, -1.0)
    # Two masks: the ratio never sees a zero, so no gradient there is 0 * inf.
    rise = torch.where(excess > 0, excess, 1.0)
    ratio = nu * (1 + nu) * (1 + K * nu) / rise
    return torch.where(excess > 0, ratio, torch.inf)


def misrouted_risk(
    q: Numbers,
    K: Numbers,
    nu: Numbers,
    experts: Literal["clean", "retrained", "full"] = "clean",
) -> Tensor:
    """Risk with the wrong expert, any other, with probability q whatever the features.

    experts "clean": fitted with correct routing; "retrained": on their block, under the
    same confusion; "full": on all d features under it. Broadcast. Needs K >= 2;
    ValueError for another kind of experts. Source: ours.
    """
    q, K, nu = share("q", q), modules(K), nonnegative("nu", nu)
    if bool((K < 2).any()):
        raise ValueError(f"a wrong expert needs K >= 2, got {float(K.min()):.6g}")
    right = 1 - q
    if experts == "clean":
        risk = right * nu / (1 + nu) + q * (1 + nu / (1 + nu) ** 2)
        return risk.expand_as(risk * K)
    if experts == "retrained":
        risk = 1 - right * _kept(right, nu)
        return risk.expand_as(risk * K)
    if experts == "full":
        return 1 - right * _kept(right, nu) - q * _kept(q / (K - 1), nu)
    raise ValueError(f"experts must be 'clean', 'retrained' or 'full', got {experts!r}")


def _kept(chance: Tensor, nu: Tensor) -> Tensor:
    """Shrinkage of a block that is alive with this chance, chance / (chance + nu)."""
    total = chance + nu
    return torch.where(total > 0, chance / torch.where(total > 0, total, 1.0), 0.0)


def breakeven(K: Numbers, nu: Numbers, retrained: bool = False) -> Tensor:
    """Share q of misrouted samples at which experts are no better than dense.

    Experts fitted with correct routing, or, retrained=True, on their block under the
    same confusion. Broadcast. Experts on all features never lose, whatever q.
    Source: ours.
    """
    K, nu = modules(K), nonnegative("nu", nu)
    if retrained:
        inflated = 1 + K * nu
        return 1 - (1 + torch.sqrt(1 + 4 * nu * inflated)) / (2 * inflated)
    return (K - 1) * nu * (1 + nu) / ((1 + K * nu) * (1 + 2 * nu))


def dragged_risks(eta: Numbers, K: Numbers, nu: Numbers) -> tuple[Tensor, Tensor]:
    """Dense and sparse risk when eta x_j is added and expert j answers for module k.

    x_j is an independent draw of module j. Broadcast; the sparse risk is always the
    larger. Source: ours, for the setting of arXiv:2601.14792, Theorem 4.4.
    """
    eta, K, nu = nonnegative("eta", eta), modules(K), nonnegative("nu", nu)
    dense = K * nu / (1 + K * nu) + eta**2 / (1 + K * nu) ** 2
    sparse = 1 + (eta**2 + nu) / (1 + nu) ** 2
    return dense, sparse.expand_as(dense)


def overlap_gap(w: Numbers, K: Numbers, nu: Numbers, cosine: Numbers = 1.0) -> Tensor:
    """Dense less sparse risk when a share w of each module's features is common to all.

    The signal is split in the same shares; on the common features the coefficients of
    two modules have mean cosine in [-1 / (K - 1), 1]; 1 means the same coefficients.
    Broadcast. (1 - w) G + w (1 - 1/K) (1 - cosine) / (1 + nu), G the gap.
    Source: ours.
    """
    w, K = share("w", w), modules(K)
    least = torch.where(K > 2, -1 / (K - 1).clamp_min(1), -1.0)
    cosine, nu = share("cosine", cosine, least), nonnegative("nu", nu)
    conflict = (1 - 1 / K) * (1 - cosine) / (1 + nu)
    return (1 - w) * isotropic_gap(K, nu) + w * conflict


def leakage_risks(
    alpha: Numbers, K: Numbers, nu: Numbers, signal: bool = False
) -> tuple[Tensor, Tensor]:
    """Dense and sparse risk when the other blocks have standard deviation alpha s.

    signal=False: the label ignores the leak. signal=True: y = beta . x sees it, and the
    sparse experts, which do not, pay. Broadcast; alpha >= 0. Source: ours.
    """
    alpha, K, nu = nonnegative("alpha", alpha), modules(K), nonnegative("nu", nu)
    leak = (K - 1) * alpha**2
    if signal:
        dense = (1 + leak) * K * nu / (1 + leak + K * nu)
        return dense, nu / (1 + nu) + leak
    dense = isotropic_dense(K, nu + leak / K)
    return dense, (nu / (1 + nu)).expand_as(dense)


def leakage_breakeven(K: Numbers, nu: Numbers) -> Tensor:
    """Leak alpha of signal above which dense beats sparse, broadcast; needs K >= 2.

    Source: ours; the positive root of a quadratic in alpha^2.
    """
    K, base = modules(K), isotropic_sparse(nu)
    if bool((K < 2).any()):
        raise ValueError(f"a leak needs K >= 2, got {float(K.min()):.6g}")
    shift = 1 + base
    # The root of t^2 + shift t = (K - 1) base, without cancellation for small base.
    t = 2 * base / (shift + torch.sqrt(shift**2 + 4 * (K - 1) * base))
    return t.sqrt()
