"""The arithmetic of a layer on a CPU: kernels of ours, or oneDNN's where those cannot be had."""
