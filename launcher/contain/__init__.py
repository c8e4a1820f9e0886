"""No process of a run escapes: processes, guardian, cgroups, and the kernel calls for them."""
