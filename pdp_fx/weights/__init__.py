"""Weights that are computed from parameters, and parameters that steps of training write to."""
