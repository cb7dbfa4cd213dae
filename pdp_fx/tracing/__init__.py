"""How a model becomes a graph: recording, symbolic tracing, and the merge of the two modes."""
