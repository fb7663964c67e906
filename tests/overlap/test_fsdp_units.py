"""Which modules fully_shard is given together: by bytes, in order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from weft.overlap.hooks import LEAST_BYTES, LEAST_UNITS, units


def blocks(*kib: int) -> list[nn.Module]:
    """Modules of so many KiB each."""
    return [nn.Linear(256, each, bias=False) for each in kib]


def kib(found: list[list[nn.Module]]) -> list[list[int]]:
    return [[sum(p.numel() * p.element_size() for p in block.parameters()) >> 10 for block in unit] for unit in found]


def test_units_have_about_the_bytes_that_were_asked_for() -> None:
    assert kib(units(blocks(*[4] * 12), least_bytes=8 << 10)) == [[4, 4]] * 6
    assert kib(units(blocks(*[4] * 12), least_bytes=12 << 10)) == [[4, 4, 4]] * 4
    assert kib(units(blocks(1, 1, 1, 1, 8, 1, 1, 1, 1), least_bytes=4 << 10)) == [[1, 1, 1, 1], [8], [1, 1, 1, 1]]


def test_a_model_of_few_bytes_has_units_to_gather_ahead() -> None:
    assert LEAST_UNITS == 4
    assert kib(units(blocks(*[4] * 8))) == [[4, 4]] * 4
    assert kib(units(blocks(4, 4))) == [[4], [4]]


def test_large_modules_stay_alone() -> None:
    assert kib(units(blocks(*[4] * 9), least_bytes=4 << 10)) == [[4]] * 9
    assert kib(units(blocks(*[8] * 9), least_bytes=3 << 10)) == [[8]] * 9


def test_modules_without_parameters_go_with_others() -> None:
    found = units([nn.ReLU(), nn.ReLU(), *blocks(4, 4), nn.ReLU()], least_bytes=4 << 10)
    assert sum(map(len, found)) == 5
    assert len(units([nn.ReLU(), nn.ReLU()])) == 1


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 64))
def test_every_module_once_and_in_order(sizes: list[int], least: int) -> None:
    modules = blocks(*sizes)
    found = units(modules, least_bytes=least << 10)
    assert [module for unit in found for module in unit] == modules
    assert all(found)
    assert len(found) <= max(LEAST_UNITS, sum(sizes) // least)
    largest = max(sum(row) for row in kib(found))
    assert largest <= max(least, sum(sizes) / LEAST_UNITS) * 2 + max(sizes)


def test_mistakes_name_the_argument() -> None:
    for modules, options, text in (
        ([], {}, "modules is empty"),
        (nn.Linear(2, 2), {}, "modules is a Linear; give modules that are computed one after the other"),
        ([nn.ReLU(), 3], {}, r"modules\[1\] is a int"),
        (blocks(4), {"least_bytes": 0}, "least_bytes is 0; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=text):
            units(modules, **options)  # type: ignore[arg-type]
    assert LEAST_BYTES == 256 << 20
