"""Launching servers as child processes: engines of this package, vLLM in an environment of its own, the router.

* ``process.Child``: one server process, with its end noticed at once and nothing left behind.
* ``guard``: the small program between a parent and its child that keeps the promise when the parent is killed.
* ``engines``: commands of engine servers.  * ``router.RouterProcess``: ``vllm-router``.
* ``vllm_env``: building the separate environment for vLLM on a CPU.

Importing this package imports none of them.
"""
