"""The sixteen GEMMs that FiCCO is evaluated on, by their global sizes.

Source: arXiv 2512.10236, and the sizes in AMD's public benchmark code. The use of each is inferred from its sizes. Each GEMM
follows an all-gather of a (M x K, rows sharded over 8 GPUs). The paper does not say that N is sharded, so that M, N and K are
those of the whole GEMM, but it is plausible. Elements have 2 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.problem import DType, Problem

WORLD_SIZE = 8
"""The number of GPUs of the paper's host."""


@dataclass(frozen=True, kw_only=True)
class GemmCase:
    """A GEMM of the paper: m x n, contracted over k, over all ranks. use: the model's projection that has these sizes."""

    name: str
    m: int
    n: int
    k: int
    use: str

    def problem(self, world_size: int = WORLD_SIZE, dtype: DType = "bfloat16") -> Problem:
        """Return the problem of the GEMM with the all-gather of its rows. Raises ValueError as Problem does."""
        return Problem(op="all_gather_matmul", m=self.m, n=self.n, k=self.k, world_size=world_size, dtype=dtype)

    def __str__(self) -> str:
        return f"{self.name}: M={self.m} N={self.n} K={self.k} ({self.use})"


def _case(name: str, m: int, n: int, k: int, use: str) -> GemmCase:
    return GemmCase(name=name, m=m, n=n, k=k, use=use)


FICCO_GEMMS: tuple[GemmCase, ...] = (
    _case("g1", 16384, 16384, 131072, "Llama-3 405B"),
    _case("g2", 131072, 16384, 16384, "Llama-3 405B"),
    _case("g3", 53248, 16384, 131072, "Llama-3 405B FFN"),
    _case("g4", 16384, 53248, 16384, "Llama-3 405B FFN"),
    _case("g5", 8192, 8192, 262144, "Llama-2 70B"),
    _case("g6", 262144, 8192, 8192, "Llama-2 70B"),
    _case("g7", 28672, 8192, 262144, "Llama-2 70B FFN"),
    _case("g8", 262144, 28672, 8192, "Llama-2 70B FFN"),
    _case("g9", 196608, 18432, 16384, "Llama-3 405B QKV"),
    _case("g10", 196608, 106496, 16384, "Llama-3 405B gate+up"),
    _case("g11", 1048576, 10240, 8192, "Llama-3 70B QKV"),
    _case("g12", 1048576, 57344, 8192, "Llama-3 70B gate+up"),
    _case("g13", 1607680, 57344, 8192, "Llama-3 70B gate+up"),
    _case("g14", 147456, 28672, 4096, "Mixtral gate+up"),
    _case("g15", 327680, 28672, 4096, "Mixtral gate+up"),
    _case("g16", 229376, 28672, 4096, "Mixtral gate+up"),
)
"""The GEMMs in the order of the paper."""


def ficco_gemm(name: str) -> GemmCase:
    """Return one of FICCO_GEMMS by name. Raises ValueError for an unknown name.

    >>> print(ficco_gemm("g4"))
    g4: M=16384 N=53248 K=16384 (Llama-3 405B FFN)
    """
    for case in FICCO_GEMMS:
        if case.name == name:
            return case
    raise ValueError(f"scenario is {name!r}; FiCCO has {', '.join(case.name for case in FICCO_GEMMS)}")
