"""The former names of lookups.py."""

from benchmarks.cases import LOOKUPS as CASES
from benchmarks.lookups import REPEAT as REPEAT
from benchmarks.lookups import LookupCase as Case
from benchmarks.lookups import Tables as Site

__all__ = ["CASES", "REPEAT", "Case", "Site"]
