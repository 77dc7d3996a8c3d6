"""Energy: the router of isotropic modules that reads the noisy features alone.

The setting is `isotropic`, with Gaussian features and p of them in each of K modules.
The posterior of the module is softmax(c |xbar_k|^2): the best router compares energies.
Experts are those fitted with correct routing, xbar_k -> beta_k . xbar_k / (1 + nu).
Risks are in units of s^2 B. nu > 0 of any shape gives the same shape in float64.

The quadratures are trapezoid sums over the whole line of analytic functions, whose
error falls exponentially; for odd p Gauss-Laguerre would meet a root at the origin.
"""

import math
from typing import NamedTuple

import torch
from scipy import special
from torch import Generator, Tensor

from moebook import laws
from moebook.checks import check_count
from moebook.modular import Numbers, nonnegative

#: Chance that the quadratures leave out at either end.
REST = 1e-20


class Routed(NamedTuple):
    """Samples (n,) with mean the soft risk, the hard risk and the accuracy."""

    soft: Tensor
    hard: Tensor
    correct: Tensor


def routing_accuracy(K: int, p: int, nu: Numbers) -> Tensor:
    """Chance that the live block has the largest energy, nu (...) -> (...).

    int f F(u (1 + nu) / nu)^(K-1) du, f and F the chi-square law with p degrees of
    freedom; absolute error below 1e-12. Differentiable in nu. TypeError or ValueError
    for K or p not an int >= 1, nu not positive and finite.
    Source: ours.
    """
    K, p, nu = check_request(K, p, nu)
    u, mass = _chi_square(K, p, nu)
    return (mass * _below(p, u * (1 + nu[..., None]) / nu[..., None], K - 1)).sum(-1)


def hard_router_risk(
    K: int, p: int, nu: Numbers, nu_test: Numbers | None = None
) -> Tensor:
    """Risk of the expert with the largest block energy, broadcast.

    Experts fitted at nu, used at nu_test (nu where None); the router needs neither.
    Absolute error below 1e-12 (times 1 + nu_test). Differentiable. Raises as
    `routing_accuracy`. Source: ours.
    """
    K, p, nu = check_request(K, p, nu)
    test = nu if nu_test is None else check_request(K, p, nu_test)[2]
    nu, test = torch.broadcast_tensors(nu, test)
    right, wrong = _energies(K, p, test)
    a = 1 / (1 + nu)
    return 1 + ((a**2 - 2 * a / (1 + test)) * right + a**2 * wrong) / p


def _energies(K: int, p: int, nu: Tensor) -> tuple[Tensor, Tensor]:
    """E |xbar|^2 / s^2 of the chosen block, where it is right and where it is wrong."""
    u, mass = _chi_square(K, p, nu)
    ratio = (1 + nu[..., None]) / nu[..., None]
    right = (u * mass * _below(p, u * ratio, K - 1)).sum(-1)
    if K == 1:
        return (1 + nu) * right, torch.zeros_like(right)
    others = _below(p, u, K - 2) * _below(p, u / ratio, 1)
    return (1 + nu) * right, (K - 1) * nu * (u * mass * others).sum(-1)


def soft_router_risk(K: int, p: int, nu: Numbers) -> Tensor:
    """Risk of the Bayes predictor, experts weighted by the posterior, (...) -> (...).

    A quadrature, absolute error below 1e-10: by 1 / W = int exp(-t W) dt the modules
    that are not alive come apart. Differentiable in nu. Raises as `routing_accuracy`.
    Source: ours.
    """
    K, p, nu = check_request(K, p, nu)
    prices = [_price(K, p, value) for value in nu.reshape(-1)]
    price = torch.stack(prices).reshape(nu.shape) if prices else torch.zeros_like(nu)
    return nu / (1 + nu) + price


def _price(K: int, p: int, nu: Tensor) -> Tensor:
    """Soft less oracle risk, () -> ().

    In y = log t: int psi(y) (1 - phi(y)^(K-1)) dy / (p (1 + nu)), where phi is the
    Laplace transform of the weight exp(v / (2 + 2 nu)) of a block that is not alive,
    and psi that of u times the Gumbel density of the live block, exp(u / 2 nu).
    """
    v, mass = _linear(p, 1.0, nu)
    rise = v / (2 * (1 + nu))
    low = -float(rise.detach().max()) - 50
    y = torch.arange(low, 4, 1 / 4, dtype=torch.float64).to(nu.device)
    deep = torch.exp(y[:, None] + rise)
    lost = -(torch.expm1(-deep) * mass).sum(1)
    u, mass = _linear(p, min(1.0, 2 * float(nu.detach())), nu, 40 - low)
    level = y[:, None] + u / (2 * nu)
    gumbel = torch.exp(level - level.clamp_max(50).exp())
    live = (gumbel * u * mass).sum(1)
    # A chance of 1 by rounding would be log(0).
    spoiled = -torch.expm1((K - 1) * torch.log1p(-lost.clamp_max(1 - 1e-16)))
    return (live * spoiled).sum() / 4 / (p * (1 + nu))


def energy_samples(
    K: int,
    p: int,
    nu: float,
    n: int,
    generator: Generator,
    *,
    dtype: torch.dtype = torch.float64,
) -> Routed:
    """Samples of the soft risk, the hard risk and correct routing, three of (n,).

    On the same draws. The risks are averaged over the directions of the coefficients,
    with the energy of the live block, whose mean is known, as control variate. Raises
    as `routing_accuracy` and `laws.gaussian`.
    Source: ours.
    """
    K, p, nu = check_request(K, p, nu)
    if nu.ndim:
        raise ValueError(f"nu must be one number, got shape {tuple(nu.shape)}")
    nu = float(nu)
    normals = laws.gaussian(n, K * p, generator, dtype=dtype)
    # Module 0 is alive: the blocks are exchangeable.
    energy = nu * (normals**2).reshape(n, K, p).sum(2)
    energy[:, 0] *= (1 + nu) / nu
    a = 1 / (1 + nu)
    gates = torch.softmax(energy / (2 * nu * (1 + nu)), 1)
    soft = 1 - a**2 / p * (gates**2 * energy).sum(1)
    top, chosen = energy.max(1)
    correct = (chosen == 0).to(dtype)
    hard = 1 + a**2 / p * (1 - 2 * correct) * top
    # The energy of the live block with its mean known: E a^2 |xbar|^2 / p = a.
    known = a**2 / p * energy[:, 0] - a
    return Routed(soft + known, hard + known, correct)


def _chi_square(K: int, p: int, nu: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes u (m,) and masses of the chi-square law with p degrees, by log u.

    The K - 1 factors F sharpen the integrand off the real axis: finer steps for them.
    """
    low = math.log(special.gammaincinv(p / 2, REST) * 2)
    high = math.log(special.gammainccinv(p / 2, REST / 10) * 2)
    step = min(0.1, 0.3 * math.sqrt(2 / p)) / (1 + math.log(K) / 2)
    t = torch.arange(low, high, step, dtype=torch.float64).to(nu.device)
    u = t.exp()
    log = p / 2 * (t - math.log(2)) - u / 2 - math.lgamma(p / 2)
    return u, step * log.exp()


def _linear(
    p: int, scale: float, like: Tensor, far: float = math.inf
) -> tuple[Tensor, Tensor]:
    """Nodes and masses of the chi-square law by u = scale log(1 + e^t), u <= scale far.

    Even in the right tail, where exp(u / scale) must not be stepped over.
    """
    low = math.log(special.gammaincinv(p / 2, REST) * 2 / scale)
    high = min(special.gammainccinv(p / 2, REST) * 2 / scale, far)
    t = torch.arange(low, high, 0.2, dtype=torch.float64).to(like.device)
    u = torch.nn.functional.softplus(t)
    log = (p / 2 - 1) * (scale * u / 2).log() - scale * u / 2 - math.lgamma(p / 2)
    return scale * u, 0.2 * scale / 2 * log.exp() * torch.sigmoid(t)


def _below(p: int, u: Tensor, power: int) -> Tensor:
    """F(u)^power, F the chi-square law with p degrees of freedom."""
    return _Law.apply(u, p) ** power


class _Law(torch.autograd.Function):
    """F by SciPy: torch.special.gammainc is off by 4e-10 from p = 50 on."""

    @staticmethod
    def forward(ctx, u: Tensor, p: int) -> Tensor:
        ctx.save_for_backward(u)
        ctx.p = p
        value = special.gammainc(p / 2, u.detach().cpu().numpy() / 2)
        return torch.as_tensor(value, device=u.device)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (u,), half = ctx.saved_tensors, ctx.p / 2
        log = (half - 1) * (u / 2).log() - u / 2 - math.lgamma(half)
        return gradient * log.exp() / 2, None


def check_request(K: int, p: int, nu: Numbers) -> tuple[int, int, Tensor]:
    """K and p as ints >= 1 and nu > 0 in float64, or an error with a way out."""
    K, p = check_count("K", K, 1), check_count("p", p, 1)
    nu = nonnegative("nu", nu)
    if not bool((nu > 0).all()):
        raise ValueError(
            "nu must be positive, got 0: without noise every block but one is silent, "
            "and all risks are 0"
        )
    return K, p, nu
