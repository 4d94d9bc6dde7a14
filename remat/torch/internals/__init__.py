"""Every private interface of PyTorch that remat uses; a test checks that no module elsewhere uses one.

Checked with PyTorch 2.11.0, 2.13.0 and 2.15.0: ``make test-torch TORCH=2.15.0`` runs the tests with another version.
The interfaces, and where PyTorch keeps them:

- trees of tensors: ``torch.utils._pytree``
- tensors without contents: ``torch._subclasses.fake_tensor``, with the one function that dispatches their operators
- dispatch modes: ``torch.utils._python_dispatch``
- Dynamo: its settings, its stance, its exceptions, its notes in a graph's nodes, its notes of what a step changes,
  the function that runs a call on tensors without contents, the one that follows a `torch.autograd.Function`
- AOT autograd: its entry, its settings, its descriptions of inputs and outputs, its guess of a gradient's layout
- the min-cut partitioner and its settings; Inductor's entry, and its setting for another partitioner
- kernels that are registered for tracing: ``OpOverload.py_kernels``, `torch._C.DispatchKey`
- registered implementations of operators, for a while: ``torch.library._scoped_library``
- native recurrent layers: ``torch._VF``; their list of weights
- the dispatch keys that a thread leaves out
- the calls that policies of selective checkpointing are not asked about
- optimizers: their `step` without hooks, the note of learning rate schedulers that it was called; hooks of a parameter;
  whether a backward pass will reach a node of the autograd graph, and its number
- the identity of a storage, the base of a view, the tables of tensors of a module, the profiler's events
- the autograd engine's callback after a backward pass, and its number of the pass that runs
- the levels of transforms and of forward-mode differentiation; hooks on backward passes of modules
- numbers that the compiler knows by a name

Operators (``torch.ops.aten``) are not private, although some names begin with an underscore: graphs consist of them.
"""
