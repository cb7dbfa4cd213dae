"""The demonstration, `python -m pdp_fx demo`: a small net learns digits dense and pruned, then shrinks."""
