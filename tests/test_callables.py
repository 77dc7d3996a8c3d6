"""callables: what experts and label mean return is looked at before it is used."""

import math

import pytest
import torch
from truths import DOUBLE, normals, star

from moebook.callables import check_temperatures, check_values, model_of


def test_a_model_keeps_the_shape_of_the_points():
    x = normals(5, 2)
    model = model_of(star(3), lambda x: x @ x.new_ones(2, 3), lambda x: x[:, 0], x)
    f, m = model(x.reshape(5, 1, 2).expand(-1, 4, -1))
    assert f.shape == (5, 4, 3) and m.shape == (5, 4)
    torch.testing.assert_close(m[:, 2], x[:, 0])


def test_points_come_in_the_dtype_of_the_input():
    seen = []
    x = normals(5, 2, dtype=torch.float32)
    model = model_of(star(3), lambda x: seen.append(x.dtype) or x[:, :1].expand(-1, 3),
                     None, x)  # fmt: skip
    model.outputs(x.double())
    assert seen == [torch.float32]


@pytest.mark.parametrize("values", [3.0, torch.zeros(4), torch.full((3, 2), math.nan)])
def test_values_are_checked(values):
    with pytest.raises(ValueError, match="experts"):
        check_values("experts", values, (3, 2), "(r, K)")
    check_values("experts", torch.full((3, 2), math.inf), (3, 2), "(r, K)")


def test_temperatures():
    assert check_temperatures(0.5, torch.device("cpu")).shape == ()
    ladder = check_temperatures((0, 1, math.inf), torch.device("cpu"))
    assert ladder.dtype == DOUBLE and ladder.tolist() == [0, 1, math.inf]
    for error, tau in ((ValueError, -1e-9), (ValueError, math.nan), (TypeError, None)):
        with pytest.raises(error, match="tau must be"):
            check_temperatures(tau, torch.device("cpu"))
