"""Channel dependencies: which channels of which tensors must be kept or dropped together.

Every tensor carries integer labels, the identities of its channels. The graph is run once; each
aten operation moves or ties labels by its rule (``rules_*``), or freezes what it cannot follow.
Labels that are tied form a class; classes that the same weights produce form a group.
"""
