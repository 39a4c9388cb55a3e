"""The embedded engine: the inference contract in this process, over torch (this package needs it).

Start with ``engine.EmbeddedEngine``.  From the outside in: ``engine`` (thread and async face), ``core`` (scheduler),
``sequence`` (one request), ``sampling``, ``prefix`` and ``sharing`` (the KV cache), ``attention``, ``runner`` with
``llama`` and ``generic`` (models), ``linear``; ``pretrained`` loads models, ``tiny`` makes random ones.
"""
