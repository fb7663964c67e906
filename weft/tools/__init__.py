"""This package has the tools of the command line that run a model, calibrate this machine, and examine it."""
