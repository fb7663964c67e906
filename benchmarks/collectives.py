"""The former name of nccl.py."""

from benchmarks.nccl import REGISTERED as REGISTERED
from benchmarks.nccl import Way as Way
from benchmarks.nccl import ways as ways
