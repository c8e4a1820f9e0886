"""What NVML says of the GPUs while the workers run: a child process that asks, and who hears it."""
