"""This package simulates ISO (arXiv 2409.11155), which splits a prompt's sequence into two halves. The all-reduce of one half
runs while the other half computes."""
