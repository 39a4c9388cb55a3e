"""How weights travel between processes: the format of what is sent, and the receiving end.

Owns: ``Raw`` tensors, messages, shared memory, delta packets, the ``Receiver``, and vLLM's plug-in.
Refuses: the sending side's decisions (``slipstream.weights``), models.

Without torch at import: vLLM's environment needs only Slipstream's core.  Importing this package imports nothing.
"""
