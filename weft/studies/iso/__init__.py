"""ISO (arXiv 2409.11155), simulated: a prompt's sequence is split into two halves, and the all-reduce of one half runs
while the other half computes."""
