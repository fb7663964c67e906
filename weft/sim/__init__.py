"""Simulator: interprets a Schedule on a Machine, event by event, and predicts its Spans."""

from weft.sim.cost import collective_us, gemm_us
from weft.sim.engine import Outcome, run, simulate

__all__ = ["Outcome", "collective_us", "gemm_us", "run", "simulate"]
