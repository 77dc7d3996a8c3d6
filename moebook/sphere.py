"""Sphere: derivatives and descent on the unit sphere, for functions of a direction.

u (d,) is one direction, (m, d) are m of them, one a row; a function maps (d,) -> () or
(m, d) -> (m,), row by row.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from moebook.checks import check_count

Vector = Tensor | Sequence
Function = Callable[[Tensor], Tensor]


def sphere_gradient(f: Function, u: Vector) -> Tensor:
    """Riemannian gradient of f on the unit sphere, (d,) -> (d,) or (m, d) -> (m, d).

    f maps (d,) -> () or (m, d) -> (m,) row by row; u is brought to length one. The
    answer is tangent: it is the part of the Euclidean gradient across u.
    Raises TypeError or ValueError for a u that is no direction, or NaN, and ValueError
    for an f of another shape. Source: ours.
    """
    u = unit("u", u)
    return _across(u, torch.func.grad(_summed(f))(u))


def sphere_hessian(f: Function, u: Vector) -> Tensor:
    """Riemannian Hessian of f on the unit sphere, (d,) -> (d, d), or (m, d, d).

    P H P - (u.g) P, with g and H the Euclidean derivatives of any extension of f and P
    the projection across u. It annihilates u: of its d eigenvalues one is zero for that
    reason. f and errors as in `sphere_gradient`.
    Source: ours.
    """
    u = unit("u", u)
    gradient = torch.func.grad(_summed(f))
    rows = [
        torch.func.grad(lambda x, j=j: gradient(x)[..., j].sum())(u)
        for j in range(u.shape[-1])
    ]
    flat = torch.stack(rows, -2)
    tangent = torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    tangent = tangent - u[..., :, None] * u[..., None, :]
    normal = (u * gradient(u)).sum(-1)[..., None, None]
    return tangent @ flat @ tangent - normal * tangent


def descend(f: Function, u: Vector, step: float, steps: int) -> Tensor:
    """Riemannian gradient descent from u, (d,) -> (d,) or (m, d) -> (m, d).

    `steps` times: u - step * gradient, brought back to length one. Follows the flow
    only for small steps: at a cone of slope b the point overshoots by up to step * b,
    and with large steps leaves the valley. Raises as `sphere_gradient`; ValueError for
    a step not positive and finite, or steps < 0. Source: ours.
    """
    u = unit("u", u)
    if isinstance(step, bool) or not isinstance(step, Real) or not 0 < step < math.inf:
        raise ValueError(f"step must be a positive finite number, got {step!r}")
    for _ in range(check_count("steps", steps, 0)):
        moved = u - step * sphere_gradient(f, u)
        u = moved / moved.norm(dim=-1, keepdim=True)
    return u


def unit(name: str, value: Vector, like: Tensor | None = None) -> Tensor:
    """The directions at length one, float64; like `like` in width and device."""
    tensor = numbers(name, value, like)
    norm = tensor.norm(dim=-1, keepdim=True)
    if not (norm > 0).all():
        raise ValueError(f"{name} must have a direction, got a zero vector")
    return tensor / norm


def numbers(name: str, value: Vector, like: Tensor | None) -> Tensor:
    """Finite numbers (d,) as wide as `like`, or (d,) or (m, d) without it, float64."""
    try:
        device = None if like is None else like.device
        tensor = torch.as_tensor(value, dtype=torch.float64, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be a tensor of numbers, got {value!r}") from error
    d = "d" if like is None else like.shape[-1]
    fits = tensor.ndim in (1, 2) if like is None else tensor.shape == (d,)
    if not fits or tensor.shape[-1] == 0:
        wanted = "(d,) or (m, d)" if like is None else f"({d},), as u has {d} columns"
        raise ValueError(
            f"{name} must have shape {wanted}, got {tuple(tensor.shape)}: one row a "
            "direction"
        )
    if not tensor.isfinite().all():
        raise ValueError(f"{name} must be finite, got NaN or infinity")
    return tensor


def _across(u: Tensor, gradient: Tensor) -> Tensor:
    return gradient - (u * gradient).sum(-1, keepdim=True) * u


def _summed(f: Function) -> Function:
    def total(x: Tensor) -> Tensor:
        value = f(x)
        if not isinstance(value, Tensor) or value.shape != x.shape[:-1]:
            got = getattr(value, "shape", type(value).__name__)
            raise ValueError(
                f"f must map (m, d) to (m,), or (d,) to (); for {tuple(x.shape)} it "
                f"returned {got}"
            )
        return value.sum()

    return total
