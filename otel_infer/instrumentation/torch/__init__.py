"""Instruments torch: forward passes, compilation and CUDA graph captures."""
