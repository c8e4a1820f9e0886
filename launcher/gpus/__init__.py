"""Which GPUs there are, which are visible, which to take. NVML only; no CUDA context is made."""
