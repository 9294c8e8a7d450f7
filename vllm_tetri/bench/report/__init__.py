"""`vllm-tetri bench report`: one page of what a suite has found."""
