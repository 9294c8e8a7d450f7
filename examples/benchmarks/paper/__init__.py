"""Experiments of TetriInfer, DistServe and Sarathi-Serve in the simulator."""
