"""The parts of the tracer (`pdp_fx.trace`), in the order in which a model passes through them.

* Given: `examples` is the call that is traced, with others like it; `findings` is what is known of the model.
  `generators`, `preserve`, `held`, `restoring` and `replacing` keep and put back what runs change, and
  `copying` copies models, and `relinking` lets what they hold lead to other layers; `compiling`, `depth`,
  `unfused`, `unmoved` and `unscripting` prepare torch and Python for the whole trace.
* Running: `forgetting` runs a model without keeping activations, `verify` on a call, `interpreting` node by
  node; `half` computes in float16. `outcome` is what a run gives, `structure` takes apart what holds tensors.
* Recording: `record` is one run. `intercept` listens to the model, and `recorder` turns what it hears into
  `steps`, for which `inputs` makes placeholders, `arguments` encodes what calls are given, and `origins` and
  `watch` know where tensors come from. `checks` adds what the graph checks, and `branches` knows which way to
  go. `functions`, `calls`, `leaves` and `applies` say how a call is written; `objects` lets a graph hold
  callables. What is switched on and off inside a model is recorded by `flags`, `gradients`, `autocasts` and
  `recomputing`, `rebinding` sees to buffers that are replaced, and `memories` and `idle` to what is not run.
* Numbers: `sizes` are live numbers, `reads` where they are read, `casts`, `yielding` and `parts` how they
  are kept alive, `chances` and `threads` where else they come from; `decoys` finds those that get lost, and
  `time_limit` ends loops that do not end with other numbers.
* Asking: `settings` and `processes` note what a model asks of its caller, `decisions`, `dtypes` and
  `kept_dtypes` what it decides by dtypes and devices, which they read in the code (`source`, `expressions`);
  `attribute_reads`, `given` and `shapes` check what the inputs are and hold, and `leaving` puts there what a
  model leaves in them.
* Attempts: `attempts` records both modes until it succeeds, and keeps whole what a graph cannot express
  (`failures`, `blame`); `skipping`, `selecting` and `masking` join recordings of several ways.
* Without a run: `symbolic`.
* Merging: `align` pairs the steps of the two modes, `emit` and `writer` write one graph with `modes`, from
  which `erasing` and `repeats` take what nobody needs. `module` holds it with `shells` and generates its code
  (`blocks`); `serial` saves it.
* Checking: `exact` compares the graph with the model, in other settings too. `resizing`, `waiving`,
  `remembering`, `same_inputs`, `key_order` and `left_out` try other sizes, second calls and other inputs;
  `unseen` and `returned` see to code that is not looked into, and `hooks` warns of what a graph does not do.
  `narrowing` finds what is to blame.
"""
