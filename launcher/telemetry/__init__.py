"""What NVML reports of the GPUs while the workers run, and what it says of their health."""
