"""Executors: a checked schedule, run on real devices. host.py on CPUs, cuda.py on GPUs; interpret.py is what they share."""
