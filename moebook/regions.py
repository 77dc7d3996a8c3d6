"""Regions: the cells that the ties of an affine router cut space into, listed.

Experts join one by one: the order of the first m experts is an order of its own
arrangement, so every region of m + 1 experts is found by extending one of m, and none
by chance. A linear program decides each with a margin: its status alone would accept
regions without interior.
"""

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor

from moebook.routing import Affine, check_active

#: A region counts if scores scaled to a range of one can part by more than this.
MARGIN = 1e-6


def orderings(weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """All orders of E affine scores that some open set of x sees, -> int64 (m, E).

    weight (E, d), bias (E,) or none; a row lists experts from best to worst, rows are
    in lexicographic order. Regions in which no point parts all scores by more than
    1e-6, in units of the range of the bias, do not count.
    Raises as routing.Affine. Source: ours; counted by `arrangement.ordering_count`.
    """
    scores = _scaled(weight, bias)
    found = [()]
    for m in range(len(scores)):
        longer = [row[:at] + (m,) + row[at:] for row in found for at in range(m + 1)]
        found = [row for row in longer if _parted(scores[list(row)])]
    return torch.tensor(sorted(found), dtype=torch.int64, device=weight.device)


def cells(weight: Tensor, bias: Tensor | None, k: int) -> Tensor:
    """All active sets of k of E experts that some open set of x sees, -> int64 (m, k).

    weight (E, d), bias (E,) or none; rows are ascending and in lexicographic order.
    Margins as in `orderings`. Raises as routing.Affine, and for k not from 1 to E.
    Source: ours; the cells of an order-k power diagram.
    """
    scores = _scaled(weight, bias)
    k = check_active(weight[:1, :1].expand(1, len(scores)), k)
    found = {()}
    for m in range(len(scores)):
        longer = found | {row + (m,) for row in found if len(row) < k}
        found = {row for row in longer if _leads(scores[: m + 1], row)}
    rows = sorted(row for row in found if len(row) == k)
    return torch.tensor(rows, dtype=torch.int64, device=weight.device)


def _scaled(weight: Tensor, bias: Tensor | None) -> np.ndarray:
    """Weights and bias (E, d + 1) of range one each: neither moves a region's order."""
    router = Affine(weight, bias)
    table = torch.cat((router.weight, router.bias[:, None]), 1).detach().cpu().double()
    table = (table - table.mean(0)).numpy()
    for part in (table[:, :-1], table[:, -1:]):
        part /= np.abs(part).max() or 1.0
    return table


def _parted(rows: np.ndarray) -> bool:
    """Whether some x orders the rows' scores strictly, the first highest."""
    if len(rows) == 1:
        return True
    # rows[i + 1] . x - rows[i] . x + t <= 0 with t as large as possible.
    step = np.diff(rows, axis=0)
    return _margin(np.column_stack((step[:, :-1], np.ones(len(step)))), -step[:, -1])


def _leads(rows: np.ndarray, active: tuple) -> bool:
    """Whether some x puts the active scores above a level and all others below."""
    if len(active) in (0, len(rows)):
        return True
    sign = np.ones((len(rows), 1))
    sign[list(active)] = -1.0
    # An active score is at least level + t, an idle one at most level - t.
    left = np.column_stack((sign * rows[:, :-1], -sign, np.ones(len(rows))))
    return _margin(left, -(sign[:, 0] * rows[:, -1]))


def _margin(left: np.ndarray, right: np.ndarray) -> bool:
    """Whether left (x, t) <= right allows t > MARGIN; t is capped at one."""
    columns = left.shape[1]
    cost = np.zeros(columns)
    cost[-1] = -1.0
    bounds = [(None, None)] * (columns - 1) + [(None, 1.0)]
    done = linprog(cost, left, right, bounds=bounds, method="highs")
    if done.status != 0:
        raise RuntimeError(
            f"the linear program of a region failed: {done.message}: scale the weights "
            "and the bias to numbers near one"
        )
    return bool(done.x[-1] > MARGIN)
