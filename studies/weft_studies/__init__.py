"""This package simulates published evaluations: T3, FiCCO, DLRM and ISO. weft finds its command by an entry point."""
