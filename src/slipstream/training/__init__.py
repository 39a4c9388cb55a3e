"""Training: backends that implement one protocol.

Owns: packed micro-batches, the vocabulary projection, optimisers, adapters, training checkpoints.
Refuses: environments, HTTP, how advantages come about.

``TrainingBackend`` (protocol, torch-free) is in ``slipstream.training.protocol``; ``TorchBackend`` in
``slipstream.training.torch_backend``.
"""
