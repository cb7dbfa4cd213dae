"""Channel dependencies: which channels of which tensors must be kept or dropped together.

Every tensor carries integer labels, the identities of its channels (`labels`). The graph is run once
(`running`); each aten operation moves or ties labels by its rule, or freezes labels that it cannot follow.
Labels that are tied form a class; classes that the same weights produce form a group. `analysis` puts the
steps together, and returns a `channel_map` that passes and reports read.

* Rules, called by `flow`: `rules_attention`, `rules_compute`, `rules_constants`, `rules_indexing`,
  `rules_joining`, `rules_layout`, `rules_norm`, `rules_pointwise`, `rules_regions`, `rules_slices` and
  `rules_weights`. `aliases` and `in_place` follow writes, `stored` knows parameters, buffers and what is made
  of them only. All that a run shows goes into a `record`.
* From labels to groups: `rectangles` keeps axes rectangular, `choices` chooses between channels of two axes,
  `streams` finds residual streams, `grouping` collects groups.
* Sizes: `elsewhere` follows channels on inputs of other sizes, where `lone_axes`, `mixed_views` and `varying`
  say what may be another there; `given_sizes`, `written_sizes` and `counts` find what the code says of sizes.
* Removing channels: `resize` finds which nodes must be given new sizes, `rewrites` updates them by what is
  `kept`, with `resizing` (one node's job) and `subscripts`.
"""
