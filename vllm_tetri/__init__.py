"""vllm-tetri: disaggregated prefill and decode on stock vLLM.

Importing the package pulls neither vllm, zmq, torch nor the native extension.
"""

__version__ = "0.1.0"
