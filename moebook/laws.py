"""Laws: seeded draws of the input laws, one row a sample.

Every draw takes its randomness, and its device, from the generator it is given; equal
generators give equal draws. Values are float64; dtype=torch.float32 is several times
faster, and enough where the tails beyond 5.7 standard deviations do not matter.
n = 0 gives an empty table.
"""

import math
import operator
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Generator, Tensor

Numbers = Tensor | Sequence


def gaussian(
    n: int,
    d: int,
    generator: Generator,
    mean: Numbers | None = None,
    covariance: Numbers | None = None,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Gaussian N(mean (d,), covariance (d, d)) -> (n, d); standard where not given.

    TypeError for a generator or dtype of another kind, ValueError for n < 0, d < 1, a
    wrong shape, a value that is not finite, or a covariance that is not symmetric and
    positive definite.
    """
    _check_request(n, d, generator, dtype)
    center = None if mean is None else _numbers("mean", mean, (d,), generator.device)
    root = None if covariance is None else _root(covariance, d, generator.device)
    samples = _normals(n, d, generator, dtype)
    if root is not None:
        samples = samples @ root.to(dtype).mT
    return samples if center is None else samples + center.to(dtype)


def ball(
    n: int,
    d: int,
    generator: Generator,
    radius: float = 1.0,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Uniform in the ball of this radius about the origin -> (n, d).

    A Gaussian direction times radius U^(1/d); a point may pass the sphere by a
    rounding. Raises as `gaussian`; ValueError for a radius not positive and finite.
    """
    _check_request(n, d, generator, dtype)
    radius = _positive("radius", radius, "a length")
    normals = _normals(n, d, generator, dtype)
    level = _uniforms(n, 1, generator, dtype)
    # A float32 normal may be exactly zero, and in one dimension that is 0/0.
    norm = torch.linalg.vector_norm(normals, dim=1, keepdim=True)
    norm = norm.clamp_min(torch.finfo(dtype).tiny)
    return normals / norm * (radius * level ** (1 / d))


def cube(
    n: int, d: int, generator: Generator, *, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Uniform in the centred unit cube [-1/2, 1/2)^d, volume one -> (n, d).

    Raises as `gaussian`.
    """
    _check_request(n, d, generator, dtype)
    return _uniforms(n, d, generator, dtype) - 0.5


def student_t(
    n: int,
    d: int,
    generator: Generator,
    dof: float,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Multivariate Student t with dof degrees of freedom, scale I -> (n, d).

    One chi-square divides all coordinates of a sample: they are uncorrelated, not
    independent. The variance is dof / (dof - 2) for dof > 2, infinite below; the mean
    exists for dof > 1. Raises as `gaussian`; ValueError for a dof not positive and
    finite.
    """
    _check_request(n, d, generator, dtype)
    dof = _positive("dof", dof, "for dof = inf draw laws.gaussian")
    normals = _normals(n, d, generator, dtype)
    shape = torch.full((n, 1), dof / 2, dtype=torch.float64, device=generator.device)
    # What torch.distributions.Gamma calls, which takes no generator.
    chi_square = 2 * torch._standard_gamma(shape, generator=generator)
    return normals * (dof / chi_square).sqrt().to(dtype)


def mixture(
    n: int,
    generator: Generator,
    weights: Numbers,
    means: Numbers,
    covariances: Numbers,
    *,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Mixture of Gaussians N(means[j], covariances[j]) with weights[j] -> (n, d).

    weights (m,), means (m, d), covariances (m, d, d): variances, not standard
    deviations. Raises as `gaussian`; ValueError for weights that are negative or do
    not sum to one.
    """
    _check_request(n, 1, generator, dtype)
    device = generator.device
    weights = _weights(weights, device)
    m = len(weights)
    means = _numbers("means", means, (m, None), device)
    d = means.shape[1]
    covariances = _numbers("covariances", covariances, (m, d, d), device)
    roots = [_root(covariance, d, device) for covariance in covariances]
    normals = _normals(n, d, generator, dtype)
    level = _uniforms(n, 1, generator, torch.float64)[:, 0]
    # The last edge is one by meaning; its rounding must not open a further component.
    component = torch.bucketize(level, weights.cumsum(0)[:-1], right=True)
    samples = torch.empty_like(normals)
    for j, root in enumerate(roots):
        chosen = component == j
        samples[chosen] = normals[chosen] @ root.to(dtype).mT + means[j].to(dtype)
    return samples


def _normals(n: int, d: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, d, generator=generator, dtype=dtype, device=generator.device)


def _uniforms(n: int, d: int, generator: Generator, dtype: torch.dtype) -> Tensor:
    return torch.rand(n, d, generator=generator, dtype=dtype, device=generator.device)


def _check_request(n: int, d: int, generator: Generator, dtype: torch.dtype) -> None:
    if not isinstance(generator, Generator):
        raise TypeError(
            "a law draws from a torch.Generator, got "
            f"{generator!r}: pass torch.Generator().manual_seed(seed)"
        )
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"a law draws torch.float64 or torch.float32, got dtype={dtype!r}: "
            "draw one of these and convert"
        )
    for name, count, least in (("n", n, 0), ("d", d, 1)):
        try:
            count = operator.index(None if isinstance(count, bool) else count)
        except TypeError as error:
            raise TypeError(
                f"{name} must be an int, got {count!r} of type "
                f"{type(count).__name__}: convert with int({name})"
            ) from error
        if count < least:
            raise ValueError(
                f"{name} must be at least {least}, got {count}: n counts samples, "
                "d their coordinates"
            )


def _positive(name: str, value: float, advice: str) -> float:
    if not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(
            f"{name} must be a positive finite number, got {value!r}: {advice}"
        )
    return float(value)


def _numbers(name: str, values: Numbers, shape: tuple, device: torch.device) -> Tensor:
    number = {"dtype": torch.float64, "device": device}
    try:
        if isinstance(values, list | tuple) and values:
            tensor = torch.stack([torch.as_tensor(value, **number) for value in values])
        else:
            tensor = torch.as_tensor(values, **number)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} must be a tensor or nested lists of numbers, got {values!r}: "
            "every row needs the same length"
        ) from error
    fits = len(shape) == tensor.ndim and all(
        want in (None, came) and came > 0
        for want, came in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if want is None else str(want) for want in shape)
        raise ValueError(
            f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}: one row "
            "a component, one column a coordinate"
        )
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, got {tensor.tolist()}")
    return tensor


def _weights(weights: Numbers, device: torch.device) -> Tensor:
    weights = _numbers("weights", weights, (None,), device)
    total = float(weights.sum())
    # Weights typed or computed in float32 miss one by up to about 1e-7.
    if (weights < 0).any() or not math.isclose(total, 1.0, rel_tol=1e-6):
        raise ValueError(
            "weights must be probabilities, not negative with sum 1, got "
            f"{weights.tolist()} with sum {total}: divide them by their sum"
        )
    return weights / total


def _root(covariance: Numbers, d: int, device: torch.device) -> Tensor:
    covariance = _numbers("covariance", covariance, (d, d), device)
    skew = (covariance - covariance.mT).abs().max()
    # Products summed in float32 miss symmetry by up to about 1e-7 of the largest.
    if skew > 1e-6 * covariance.abs().max():
        raise ValueError(
            f"the covariance must be symmetric, got {covariance.tolist()}: "
            "use (covariance + covariance.mT) / 2"
        )
    root, failed = torch.linalg.cholesky_ex(covariance)
    if failed:
        least = float(torch.linalg.eigvalsh(covariance)[0])
        raise ValueError(
            "the covariance must be positive definite, got smallest eigenvalue "
            f"{least:.3g}: for a flat law, draw in fewer dimensions and multiply by "
            "a root of the covariance"
        )
    return root
