"""vllm-tetri: disaggregated prefill and decode on stock vLLM.

Importing the package pulls neither vllm, zmq, torch nor the native extension.
"""

__version__ = "0.1.0"

# Minor releases of vLLM that were tested (docs/operations.md says how). `--role` goes on with a
# warning on the next one.
TESTED_VLLM = ("0.31", "0.32")
