"""Truths: routers with exact boundary masses, and means that a mistake would spoil."""

import math

import torch
from scipy import integrate, special, stats

from moebook.routing import Affine

INF = math.inf

DOUBLE = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normals(n, d, seed=0, dtype=DOUBLE):
    return torch.randn(n, d, generator=generator(seed), dtype=dtype)


def random_router(K, d, seed=0, bias=0.5, dtype=DOUBLE):
    weight = normals(K, d, seed, dtype) / math.sqrt(d)
    return Affine(weight, bias * normals(1, K, seed + 1, dtype)[0])


def identity(K, dtype=DOUBLE):
    return Affine(torch.eye(K, dtype=dtype))


def star(K, dtype=DOUBLE):
    """K unit vectors at equal angles in the plane."""
    angle = torch.arange(K, dtype=dtype) * (2 * math.pi / K)
    return Affine(torch.stack((angle.cos(), angle.sin()), 1))


def assert_mean(samples, truth, *, bias=0.0, off=0.02):
    """Five standard errors of the sample, and a truth `off` away is refuted."""
    samples = samples.double()
    error = samples.std().item() / math.sqrt(len(samples))
    allowed = 5 * error + bias
    miss = samples.mean().item() - truth
    assert abs(miss) <= allowed, f"{samples.mean():.8g} +- {error:.2g}, not {truth:.8g}"
    assert abs(miss - off * truth) > allowed, "the sample could not notice a mistake"
    assert abs(miss + off * truth) > allowed, "the sample could not notice a mistake"


def refuted(samples, truth):
    error = samples.std().item() / math.sqrt(len(samples))
    return abs(samples.mean().item() - truth) > 5 * error


def iid_mass(w, K, k=1):
    """P(gap_k <= w) of K independent logits: integrate the k-th largest, one by one."""

    def inside(y):
        below = special.ndtr(y) ** (K - k) - special.ndtr(y - w) ** (K - k)
        return stats.norm.pdf(y) * special.ndtr(-y) ** (k - 1) * below

    return K * math.comb(K - 1, k - 1) * integrate.quad(inside, -9, 9, epsabs=1e-13)[0]


def iid_slope(K, k=1):
    def inside(y):
        ranks = special.ndtr(-y) ** (k - 1) * special.ndtr(y) ** (K - k - 1)
        return stats.norm.pdf(y) ** 2 * ranks

    count = K * math.comb(K - 1, k - 1) * (K - k)
    return count * integrate.quad(inside, -9, 9, epsabs=1e-13)[0]


def vec(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


#: A separator and a contrast that are neither parallel nor orthogonal, and two axes.
V, A = vec(1.0, 2.0, -1.0), vec(0.3, -0.5, 1.0)
E1, E2 = vec(1.0, 0.0, 0.0), vec(0.0, 1.0, 0.0)


def teacher(v=V, a=A):
    return lambda x: torch.sign(x @ v) * (x @ a)


def close(found, truth, atol=1e-11):
    torch.testing.assert_close(found, truth, rtol=0, atol=atol)
