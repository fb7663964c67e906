"""The last-level cache of the simulated T3: its formula, and the same GEMMs line by line through set-associative caches."""

from __future__ import annotations

import pytest
from t3_lines import Indexing, folded, modulo, read_bytes, scattered
from t3_tiny import product, tiny

from weft_studies.t3.kernels import Grid, input_reads, share_in_cache
from weft_studies.t3.system import SUBLAYERS, load

WAYS = 16


def test_outputs_evict_inputs() -> None:
    """Each wave of 2 x 16 tiles reads b's 16 panels, 4 KiB, and 2 of a's, 512 bytes, and writes 1 KiB. What lies between two
    reads of a line of b is 4.5 KiB where outputs bypass the cache of 5 KiB, else 5.5; a's panels are read once."""
    grid = Grid(product(32, 64, 32), tiny(units=32, llc__bytes=5120))
    assert input_reads(grid, 32, bypass=True) == (4608, 512, 512, 512)
    assert input_reads(grid, 32, bypass=False) == (4608, 4608, 4608, 4608)


def test_a_distance_that_changes_along_k() -> None:
    """Waves of 4 x 4, 4 x 4 and 1 x 2 tiles of a 4 x 10 grid; a panel has 256 bytes, and 4 of a are in all waves. Between two
    reads of a line of a lie these 4 and, from the first wave to the second, 4 of b; to the third, from 4 of b at the start of
    K down to 2 at its end: in a cache of 7 panels the second half is still there."""
    grid = Grid(product(16, 40, 32), tiny(units=16, llc__bytes=7 * 256, tile__group_rows=4))
    assert input_reads(grid, 16, bypass=True) == (8 * 256, 8 * 256, 4 * 128 + 2 * 256)


def test_kept_falls_with_distance() -> None:
    shares = [share_in_cache(1024, first, first + 256) for first in range(512, 1281, 64)]
    assert shares == [1.0] * 5 + [0.75, 0.5, 0.25] + [0.0] * 5
    assert [share_in_cache(1024, first + 256, first) for first in range(512, 1281, 64)] == shares


def test_the_cache_never_reads_less_than_all_or_more_than_every_wave() -> None:
    for sublayer in SUBLAYERS[::3]:
        grid = Grid(sublayer.gemm, load())
        once = sublayer.gemm.k * 2 * (sublayer.gemm.m + sublayer.gemm.n)
        every = sum(grid.panel_bytes(panel) for wave in grid.waves(80) for panel in grid.panels(wave))
        bypassing, through = (sum(input_reads(grid, 80, bypass=bypass)) for bypass in (True, False))
        assert once <= bypassing <= through <= every


@pytest.mark.parametrize("bypass", [True, False])
@pytest.mark.parametrize("llc", [960, 1100, 1600])
def test_fully_associative_line_by_line(llc: int, *, bypass: bool) -> None:
    """A cache of one set has no conflicts. Panels of 128 KiB, in waves of 3 x 4 tiles, in rows of two and a half waves."""
    grid = Grid(
        product(448, 640, 1024), tiny(units=12, llc__bytes=llc * 1024, tile__rows=64, tile__cols=64, tile__group_rows=3)
    )
    ours = sum(input_reads(grid, 12, bypass=bypass))
    assert ours == pytest.approx(read_bytes(grid, llc * 8, modulo, bypass=bypass, followed=1), rel=0.01)


@pytest.mark.parametrize(("name", "indexing"), [("Mega-GPT-2 TP8 FC2", folded), ("T-NLG TP16 FC2", modulo)])
def test_sets_by_address_add_few_conflicts(name: str, indexing: Indexing) -> None:
    """The two that gain most from outputs that bypass the cache, of 16 MiB in 16 ways: within 0.12 of the output's size."""
    assert max(abs(error) for error in _errors(name, indexing)) < 0.12


def test_sets_by_a_random_hash_smear_the_edge() -> None:
    """There the formula would be wrong: a layer whose inputs just fit would read more than half as much again."""
    bypassing, _ = _errors("Mega-GPT-2 TP8 FC2", scattered)
    assert bypassing < -0.3


def _errors(name: str, indexing: Indexing) -> tuple[float, ...]:
    """What the formula reads more than the cache, in sizes of the output: with outputs bypassing, and without."""
    sublayer = next(each for each in SUBLAYERS if each.name == name)
    grid = Grid(sublayer.gemm, load())
    return tuple(
        (sum(input_reads(grid, 80, bypass=bypass)) - read_bytes(grid, WAYS, indexing, bypass=bypass, followed=64))
        / sublayer.gemm.out_bytes
        for bypass in (True, False)
    )
