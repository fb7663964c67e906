"""Did a change make anything slower or larger? __main__.py says how it is measured."""
