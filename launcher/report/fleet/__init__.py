"""Many runs, of many machines, as one report."""
