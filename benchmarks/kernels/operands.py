"""What launches of the GEMM kernel need besides their operands: a step in parts, open flags, and the GPU's profile."""

from __future__ import annotations

from itertools import pairwise

import torch

from weft.core.schedule import Flag, Gemm, Part, Region, Wait
from weft.kernels.gemm import Tables, blocks_for, tables
from weft.perf.shapes import TileShape
from weft.runtime.choose import nearest_profile
from weft.schedules.builder import aligned_slices

CALLS, ROUNDS = 3, 12


def step(m: int, n: int, k: int, *, parts: int = 1, gates: bool = False, counts: bool = False, slices: int = 1) -> Gemm:
    """A GEMM whose rows are in so many parts. gates: a part waits for a flag, and all but the first for one more before each
    slice of K after the first. counts: a part's tiles are counted."""
    inner = tuple((low, Wait(Flag("open", 0, 16 + i))) for i, (low, _) in enumerate(aligned_slices(k, slices)[1:]))
    made = [
        Part(
            Region("a", 0, rows, (0, k)),
            Region("out", 0, rows, (0, n)),
            (Wait(Flag("open", 0, i)),) if gates else (),
            Flag("made", 0, i) if counts else None,
            inner=inner if i else (),
        )
        for i, rows in enumerate(pairwise(i * m // parts for i in range(parts + 1)))
    ]
    return Gemm(Region("b", 0, (0, k), (0, n)), tuple(made))


class Launches:
    """status: what launches report; 0 is right."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.words = torch.ones(64, device=self.device, dtype=torch.int32)
        self.status = torch.zeros(2, device=self.device, dtype=torch.int32)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count
        self.profile = nearest_profile(self.device)

    def best(self, made: Gemm, *scaling: object) -> TileShape:
        """The tile shape that weft takes for a step."""
        return blocks_for(made, self.device, self.profile, *scaling)  # type: ignore[arg-type]

    def plan(self, made: Gemm, blocks: TileShape, *, split: bool = False) -> Tables:
        """split: all parts but the first are read from a second tensor."""
        begin = self.words.data_ptr()
        return tables(
            made,
            device=self.device,
            blocks=blocks,
            source=lambda part: int(split and part.a.rows[0] > 0),
            gate_address=lambda flag: begin + 4 * flag.index,
            count_address=lambda flag: begin + 4 * (flag.index + 32),
            stored_at=None,
            need=lambda _: 1,
        )
