"""Checks: the inputs that several modules share, refused with a way out.

Each says what was expected, what came and what to do; none changes a number.
"""

import operator

import torch
from torch import Generator, Tensor

from moebook.routing import Affine, check_active


def check_router(router: Affine, k: int) -> int:
    """The number k of active experts as an int, if the router has that many."""
    if not isinstance(router, Affine):
        raise TypeError(
            "a routing.Affine is needed, whose logits are linear along lines, got "
            f"{type(router).__name__}: for a smooth score use boundary.interface"
        )
    return check_active(router.bias[None], k)


def check_input(x: Tensor, d: int | None) -> None:
    """Refuse what is no table of samples, float32 or float64 (n, d), any d for None."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x must be a float32 or float64 tensor (n, d), got {kind}: draw it by "
            "laws.gaussian, or convert with x.double()"
        )
    if x.ndim != 2 or x.shape[1] == 0 or d not in (None, x.shape[1]):
        raise ValueError(
            f"x must have shape (n, {'d' if d is None else d}), one row a sample, got "
            f"{tuple(x.shape)}"
        )


def check_widths(w: float | Tensor, device: torch.device) -> Tensor:
    """The widths in float64, () or (m,)."""
    widths = torch.as_tensor(w, dtype=torch.float64, device=device)
    if widths.ndim > 1 or not bool((widths >= 0).all()):
        raise ValueError(
            "w must be a width >= 0 in units of the logits, or a row of them (0 and "
            f"inf are allowed), got {w!r}"
        )
    return widths


def check_choices(x: Tensor, law: str, by: str, default: str) -> None:
    """Refuse an unknown law, a `by` other than default or stein, and x off its law."""
    if law not in ("gaussian", "ball") or by not in (default, "stein"):
        raise ValueError(
            f"law must be 'gaussian' or 'ball' and by {default!r} or 'stein', got "
            f"law={law!r} and by={by!r}"
        )
    if law == "ball" and by == "stein":
        raise ValueError(
            "by='stein' integrates by parts against the Gaussian density: for "
            f"law='ball' use by={default!r}"
        )
    if law == "ball":
        check_ball(x)


def check_ball(x: Tensor) -> None:
    """Refuse inputs (n, d) that are not in the unit ball."""
    if len(x) and (far := x.norm(dim=1).max().item()) > 1 + 1e-5:
        raise ValueError(
            f"law='ball' needs x in the unit ball, got a row of norm {far:.4g}: draw x "
            "by laws.ball"
        )


def check_finite(witness: Tensor, x: Tensor) -> Tensor:
    """The witness in float64: cheap to look at, finite only if all of x is."""
    if not witness.isfinite().all() and not x.isfinite().all():
        raise ValueError(
            f"x must be finite, got {int((~x.isfinite()).sum())} NaN or infinite "
            "numbers: look for them where x is drawn"
        )
    return witness.double()


def check_starts(x: Tensor, generator: Generator) -> Tensor:
    """The starts (n, d) of a motion in float64, on the device of its generator."""
    if not isinstance(generator, Generator):
        raise TypeError(
            f"a motion draws from a torch.Generator, got {generator!r}: pass "
            "torch.Generator().manual_seed(seed)"
        )
    check_input(x, None)
    if not x.isfinite().all():
        raise ValueError("x must be finite, got NaN or infinity: look where x is drawn")
    return x.detach().to(generator.device, torch.float64)


def check_count(name: str, count: int, least: int = 1, most: int | None = None) -> int:
    """The count as an int, if it is a whole number from least to most."""
    try:
        count = operator.index(None if isinstance(count, bool) else count)
    except TypeError as error:
        raise TypeError(
            f"{name} must be an int, got {count!r} of type {type(count).__name__}: "
            "choose a whole number"
        ) from error
    if count < least or (most is not None and count > most):
        span = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {span}, got {count}")
    return count
