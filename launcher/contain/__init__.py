"""Nobody escapes: processes, guardian, cgroups, and the kernel calls for them."""
