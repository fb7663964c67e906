"""How fast are weft's kernels alone, on one GPU? __main__.py has the parts."""
