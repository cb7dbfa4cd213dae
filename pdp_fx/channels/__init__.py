"""Channel dependencies: which channels of which tensors must be kept or dropped together.

Every tensor carries integer labels, the identities of its channels (`labels`). The graph is run once
(`running`); each aten operation moves or ties labels by its rule (``rules_*``, called by `flow`), or freezes
labels that it cannot follow. Labels that are tied form a class; classes that the same weights produce form a
group (`grouping`). Where views are given sizes, a run on inputs of other sizes shows what is tied there
(`elsewhere`). `analysis` puts these steps together and returns a `channel_map.ChannelMap`.
"""
