"""vllm-tetri: disaggregated prefill and decode on stock vLLM.

Importing the package pulls neither vllm, zmq, torch nor the native extension.
"""

__version__ = "0.1.0"

# The vLLM releases that `--role` accepts.
SUPPORTED_VLLM = ("0.32.0",)
