"""This package simulates published evaluations: T3, FiCCO, DLRM and ISO. Only the command line and the report import it."""
