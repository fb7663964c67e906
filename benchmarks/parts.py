"""The former name of runner.py."""

from benchmarks.runner import run_jobs as run_jobs
