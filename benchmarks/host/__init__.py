"""How long do calls and training steps keep the host busy? __main__.py says how it is measured."""
