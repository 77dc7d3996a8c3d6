"""Callables: experts and label mean, called at tables of points and checked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moebook.checks import check_finite, check_input, check_router
from moebook.routing import Affine

Function = Callable[..., Tensor]


class Model(NamedTuple):
    """Experts and label mean, with what they must return."""

    experts: Function
    label_mean: Function | None
    K: int
    dtype: torch.dtype

    def outputs(self, points: Tensor) -> Tensor:
        """Outputs of the experts at points, (..., d) -> (..., K)."""
        flat = self._rows(points)
        f = self.experts(flat)
        check_values("experts", f, (len(flat), self.K), "(r, K), a column an expert")
        return f.reshape(*points.shape[:-1], self.K)

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs (..., K) and label means (...) at points (..., d)."""
        f, flat = self.outputs(points), self._rows(points)
        m = self.label_mean(flat)
        check_values("label_mean", m, (len(flat),), "(r,), a number a row")
        return f, m.reshape(points.shape[:-1])

    def _rows(self, points: Tensor) -> Tensor:
        return points.reshape(-1, points.shape[-1]).to(self.dtype)


def model_of(
    router: Affine, experts: Function, label_mean: Function | None, x: Tensor
) -> Model:
    """The model for inputs x (n, d) that fit the router, both checked."""
    check_router(router, 1)
    check_input(x, router.weight.shape[1])
    check_finite(x.sum(), x)
    return Model(experts, label_mean, len(router.bias), x.dtype)


def check_temperatures(tau: float | Tensor | Sequence, device: torch.device) -> Tensor:
    """The temperatures in float64, () or (m,)."""
    try:
        ladder = torch.as_tensor(tau, dtype=torch.float64, device=device).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"tau must be a real number, or a row of them, got {tau!r}"
        ) from error
    if ladder.ndim > 1 or not bool((ladder >= 0).all()):
        raise ValueError(
            "tau must be a temperature >= 0 in units of the logits, or a row of them, "
            f"got {tau!r}"
        )
    return ladder


def check_values(name: str, values: Tensor, shape: tuple, rule: str) -> None:
    """Refuse what a callable must not return; rule says its shape in letters."""
    if not isinstance(values, Tensor) or values.shape != shape:
        got = getattr(values, "shape", type(values).__name__)
        got = tuple(got) if isinstance(got, torch.Size) else got
        raise ValueError(
            f"{name} must map points (r, d) to {rule}: expected {shape} from "
            f"{shape[0]} points, got {got}"
        )
    if values.detach().sum().isnan() and values.isnan().any():
        raise ValueError(
            f"{name} is NaN at {int(values.isnan().sum())} of {values.numel()} places: "
            "it must be a number everywhere, since lines pass everywhere"
        )
