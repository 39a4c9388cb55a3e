"""A worker extension that can be told to misbehave; loaded into vLLM's worker by ``test_vllm_publish.py``."""

from slipstream.inference.transfer import vllm_plugin

_LOAD = vllm_plugin.load


class FaultyExtension(vllm_plugin.WorkerExtension):
    """The plug-in's extension, and a fault."""

    def slipstream_fault(self, what):
        """``skip-load``: updates are received and confirmed, and nothing is loaded; empty: sound again."""
        vllm_plugin.load = _LOAD if not what else lambda *args: None
        return what or "sound"
