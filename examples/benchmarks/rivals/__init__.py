"""Systems of other papers, simulated on top of `vllm_tetri.sim`."""
