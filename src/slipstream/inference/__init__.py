"""Inference: one contract (``types``), every engine behind it, and HTTP on both sides of it.

* ``types``: requests, results, the ``Engine`` protocol.  * ``client.HttpEngine``: the protocol over HTTP.
* ``server``: vLLM's API over any engine.  * ``wire``: the JSON.  * ``conformance``: the contract as checks.
* ``fake.FakeEngine``: a bigram model behind the whole contract.  * ``embedded``: the engine for real models (torch).
* ``checksum``: one content hash for trainer, engine and publisher.

Importing this package imports none of them, and none but ``embedded`` imports torch.
"""
