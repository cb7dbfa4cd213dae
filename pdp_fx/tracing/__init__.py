"""The parts of the tracer (`pdp_fx.trace`), in the order in which a model passes through them.

* Recording: `intercept` listens to a running model, `recorder` turns what it hears into `steps`; `calls`,
  `reads`, `casts` and `sizes` handle modules, metadata and numbers; `attempts` records both modes and keeps
  whole what a graph cannot express (`blame`, `failures`, `findings`); `skipping` joins recordings that skip
  different layers. `symbolic` does without a run.
* Merging: `align` pairs the steps of the two modes, `emit` and `writer` write one graph, `module` holds it
  and generates its code (`recomputing`: activation checkpointing; `blocks`: layers that may be skipped).
* Checking: `exact` compares the graph with the model (`verify`, `outcome`), `resizing`, `remembering` and
  `waiving` try it on other sizes and on second calls; `preserve` undoes all that runs have changed.
"""
