"""Run-time operators, and what the compiler knows of torch's modules and functions.

* What masks compute: `select` and `ranking` (exact selection), `threshold`, `soft_mask`, `nm` and `nm_mask`,
  `straight` (straight-through gradients), `decay`, `squares` (sums of squares), `finite` (checks for NaN),
  and on a GPU `gpu`, `kernels` and `together`.
* What layers compute with: `explicit` and `explicit_recurrent` (modules that take parameters as arguments),
  and `masked_norm` (norms over masked channels).
* What passes ask: `kinds` (modules with weights), `products` (functions with weights), `folding` (BatchNorm).
* What graphs call: `data`, for `Tensor.data`.
"""
