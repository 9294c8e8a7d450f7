"""The vLLM side: plugin, scheduler, connector. The only importer of vllm."""
