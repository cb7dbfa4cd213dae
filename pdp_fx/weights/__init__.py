"""Weights that are computed from parameters, and parameters that training steps write to.

`uses` finds the parameters behind a weight, with `effects` (which of them can be masked in its place) and
`stand_in` (which weight can be pruned in the place of a parameter); `sources` says what a weight is computed
from, and `writes` what the model itself writes to, as power iterations do; `without_gradients` finds what
runs under `torch.no_grad()`.
"""
