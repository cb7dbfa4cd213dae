"""The demonstration, `python -m pdp_fx demo`: a small net learns digits dense and pruned, then shrinks."""

from pdp_fx.demo.main import run as run
